"""Command line of a study, which the table and the figures share: flags, plan, training."""

import argparse
import sys
from pathlib import Path

from hyvideo.config.rules import check_evaluation
from hyvideo.data.outside import Parser
from hyvideo.evaluation.table2.runs import SETTINGS, Study, TableRun, progress, split_extra
from hyvideo.evaluation.table2.train_runs import describe, plan_run, train_runs

WORLDS = {"miniature": "configs/miniature.yaml"}
MINIATURE_NOISE = "sage_grpo:0.7"


def study_parser(doc: str) -> argparse.ArgumentParser:
    """Parser with the flags of every study."""
    parser = Parser(doc)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--world", choices=list(WORLDS), help="a world that needs no download")
    where.add_argument("--config", help="YAML of a run, with valid_video_csv")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="reward weights")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--match_noise",
        help=f"sde_type:eta whose total noise every sampler gets; {MINIATURE_NOISE} with --world, none with --config; "
        '"" is none',
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/table2"))
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time on this machine")
    parser.add_argument("--num_gpus", type=int, default=0, help="processes of torchrun for each cell; 0 is without")
    parser.add_argument("--extra", default="", help='flags of post_train.py for every cell: "max_steps 30 eta 0.5"')
    parser.add_argument("--only_cell", metavar="NAME", help="take this cell alone, and make no table or figure")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and its cost, write nothing")
    return parser


def study_of(options: argparse.Namespace, *, scorers: list[str] | None = None) -> Study:
    """The study that the flags ask for. Raises ValueError for flags that cannot go together."""
    jobs, num_gpus = options.jobs, options.num_gpus
    if jobs < 1 or num_gpus < 0 or (num_gpus and jobs > 1):
        raise ValueError(f"--jobs must be at least 1, and 1 with --num_gpus above 0, got {jobs} and {num_gpus}")
    noise = options.match_noise
    return Study(
        config_file=WORLDS[options.world] if options.world else options.config,
        out=options.out,
        extra=split_extra(options.extra),
        match_noise=(MINIATURE_NOISE if options.world else "") if noise is None else noise,
        num_gpus=num_gpus,
        scorers=scorers or [],
    )


def named(runs: list[TableRun], name: str | None) -> list[TableRun]:
    """Runs of that name, or all without one. Raises ValueError for a name that none has."""
    chosen = [run for run in runs if name in (None, run.name)]
    if not chosen:
        raise ValueError(f"--only_cell must name a cell of the plan, such as {runs[0].name}; --dry_run lists them")
    return chosen


def plan_and_train(
    study: Study, runs: list[TableRun], *, jobs: int, trains: bool, evaluates: bool
) -> dict[TableRun, Path]:
    """Prints the plan and, if it ``trains``, trains what is not finished; gives the logs of the runs that failed."""
    plans = [plan_run(study, run, trains=trains) for run in runs]
    check_evaluation(study.evaluation_config(), output=study.out, has_model=trains)
    print(describe(study, plans, evaluates=evaluates), flush=True)
    to_run = [plan.run for plan in plans if not plan.progress.is_finished]
    return train_runs(study, to_run, jobs=jobs) if trains else {}


def exit_code(failed: dict[TableRun, Path]) -> int:
    """Code of a program whose runs failed or not; names those that did on stderr."""
    for run, log in failed.items():
        print(f"failed: {run.name}, see {log}", file=sys.stderr)
    return 1 if failed else 0


def finished(study: Study, runs: list[TableRun]) -> list[Path]:
    """Folders of the runs that are trained to their end."""
    return [study.folder(run) for run in runs if progress(study.folder(run), study.config(run)).is_finished]
