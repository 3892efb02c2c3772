"""Command line of a study, which tables and figures share: flags, plan, training."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from hyvideo.config.command_line import value_of
from hyvideo.config.rules import check_evaluation
from hyvideo.data.outside import Parser
from hyvideo.evaluation.studies.cells import OF_A_CELL, SETTINGS
from hyvideo.evaluation.studies.runs import Run, Study, progress, refuse_flags
from hyvideo.evaluation.studies.train_runs import describe, plan_run, train_runs

WORLDS = {"miniature": "configs/miniature_paper.yaml"}
MINIATURE_NOISE = "sage_grpo:0.7"


def study_parser(doc: str, *, out: str, makes: str) -> argparse.ArgumentParser:
    """Parser with the flags of every study; ``makes`` is a table or a figure."""
    parser = Parser(doc)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--jobs", type=int, default=1, help="runs that go on at a time on this machine")
    parser.add_argument("--num_gpus", type=int, default=0, help="processes of torchrun for each run; 0 is without")
    parser.add_argument("--only_cell", metavar="NAME", help="take this run alone, and make no table or figure")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and its cost, write nothing")
    words = f"train nothing, make the {makes} of what is finished"
    parser.add_argument(f"--only_{makes}", dest="trains_nothing", action="store_true", help=words)
    return parser


def grid_parser(doc: str, *, makes: str) -> argparse.ArgumentParser:
    """Parser of a study of the cells of Table 2."""
    parser = study_parser(doc, out="outputs/table2", makes=makes)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--world", choices=list(WORLDS), help="the miniature, which needs no download")
    where.add_argument("--config", help="YAML of a run, with valid_video_csv")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="reward weights")
    parser.add_argument("--methods", nargs="+", type=partial(value_of, "sde_type"), metavar="SDE_TYPE", help="samplers")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--match_noise",
        help=f"sde_type:eta whose total noise every sampler gets; {MINIATURE_NOISE} with --world, none with --config; "
        '"" is none',
    )
    parser.add_argument("--extra", default="", help='flags of post_train.py for every cell: "max_steps 30 eta 0.5"')
    return parser


def grid_study(options: argparse.Namespace, *, scorers: list[str] | None = None) -> Study:
    """The study that the flags of `grid_parser` ask for. Raises ValueError for flags that cannot go together."""
    extra, noise = split_extra(options.extra), options.match_noise
    refuse_flags(extra, OF_A_CELL)
    if noise is None and options.world:
        noise = MINIATURE_NOISE
    extra = (["--match_noise", noise] if noise else []) + extra
    return Study(WORLDS.get(options.world, options.config), options.out, extra, options.num_gpus, scorers or [])


def split_extra(text: str) -> list[str]:
    """Flags of post_train.py from ``"max_steps 30 eta 0.5"`` or ``"--max_steps 30 --eta 0.5"``."""
    words = shlex.split(text)
    if not words or words[0].startswith("--"):
        return words
    if len(words) % 2:
        raise ValueError(f"--extra takes pairs of a flag and a value, or flags with their dashes, got {text!r}")
    return [word for name, value in zip(words[::2], words[1::2]) for word in (f"--{name}", value)]


def plan_and_train(study: Study, runs: list[Run], options: argparse.Namespace) -> int:
    """Prints the plan, trains what is not finished, gives the exit code. ValueError for bad flags and as `plan_run`."""
    jobs, num_gpus = options.jobs, study.num_gpus
    if jobs < 1 or num_gpus < 0 or (num_gpus and jobs > 1):
        raise ValueError(f"--jobs must be at least 1, and 1 with --num_gpus above 0, got {jobs} and {num_gpus}")
    trains = not (options.dry_run or options.trains_nothing)
    plans = [plan_run(study, run, trains=trains) for run in named(runs, options.only_cell)]
    check_evaluation(study.evaluation_config(), output=study.out, has_model=trains)
    print(describe(study, plans), flush=True)
    to_run = [plan.run for plan in plans if not plan.progress.is_finished]
    failed = train_runs(study, to_run, jobs=jobs) if trains else {}
    for run, log in failed.items():
        print(f"failed: {run.name}, see {log}", file=sys.stderr)
    return 1 if failed else 0


def named(runs: list[Run], name: str | None) -> list[Run]:
    """Runs of that name, or all without one. Raises ValueError for a name that none has."""
    chosen = [run for run in runs if name in (None, run.name)]
    if not chosen:
        raise ValueError(f"--only_cell must name a cell of the plan, such as {runs[0].name}; --dry_run lists them")
    return chosen


def finished(study: Study, runs: list[Run]) -> list[Run]:
    """The runs that are trained to their end."""
    return [run for run in runs if progress(study.folder(run), study.config(run)).is_finished]
