"""Command line shared by the studies of tables and figures: flags, plan, training."""

import argparse
import shlex
from pathlib import Path

from hyvideo.checks.rules import check_evaluation
from studies.recipes.runs import RecipeRun, RecipeStudy, reject_flags
from studies.recipes.train_runs import describe, plan_run, train_runs
from studies.tables.cells import CELL_FLAGS, SETTINGS

WORLDS = {"miniature": "configs/miniature_paper.yaml"}
MINIATURE_NOISE = "sage_grpo:0.7"


def add_study_flags(parser: argparse.ArgumentParser, *, out: str, makes: str) -> None:
    """Add the flags of every study; ``makes`` is ``table`` or ``figure``."""
    parser.add_argument("--output_dir", type=Path, default=Path(out), help="output folder")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of runs to train at the same time"
    )
    parser.add_argument(
        "--num_gpus",
        type=int,
        default=0,
        help="processes of torchrun for each run; 0 for no torchrun",
    )
    parser.add_argument(
        "--only_cell", metavar="NAME", help="train only this run, without a table or figure"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the plan and its cost without writing anything",
    )
    parser.add_argument(
        f"--only_{makes}",
        dest="trains_nothing",
        action="store_true",
        help=f"make the {makes} from finished runs without training",
    )


def add_grid_flags(parser: argparse.ArgumentParser, *, makes: str) -> None:
    """Add the flags of a study of cells of Table 2."""
    add_study_flags(parser, out="outputs/table2", makes=makes)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--world", choices=list(WORLDS), help="use the miniature, which needs no download"
    )
    where.add_argument("--config", help="YAML file of a run, with valid_video_csv")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        default=list(SETTINGS),
        help="reward weights",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="SDE_TYPE",
        help="samplers",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="training seeds")
    parser.add_argument(
        "--eta",
        help="eta of all cells: a number, or SAMPLER:ETA whose noise all have; default: "
        f"{MINIATURE_NOISE} with --world, the value of the file with --config",
    )
    parser.add_argument(
        "--extra",
        default="",
        help='flags of post_train.py for every cell: "--max_steps 30"',
    )


def grid_study(options: argparse.Namespace, *, scorers: list[str] | None = None) -> RecipeStudy:
    """Return the study for the flags of `add_grid_flags`. Raises ValueError for incompatible flags."""
    extra = shlex.split(options.extra)
    eta = options.eta
    reject_flags(extra, CELL_FLAGS)
    if eta is None and options.world:
        eta = MINIATURE_NOISE
    extra = (["--eta", eta] if eta else []) + extra
    return RecipeStudy(
        WORLDS.get(options.world, options.config),
        options.output_dir,
        extra,
        options.num_gpus,
        scorers or [],
    )


def plan_and_train(study: RecipeStudy, runs: list[RecipeRun], options: argparse.Namespace) -> int:
    """Print the plan, train unfinished runs and return the exit code.

    Raises ValueError for invalid flags or runs.
    """
    jobs = options.jobs
    num_gpus = study.num_gpus
    if num_gpus and jobs > 1:
        raise ValueError(f"--jobs must be 1 with --num_gpus, got {jobs}: the runs share the GPUs")
    trains = not (options.dry_run or options.trains_nothing)
    plans = [plan_run(study, run, trains=trains) for run in select_runs(runs, options.only_cell)]
    config = study.evaluation_config()
    root = config.model.pretrained_model_root if trains else None
    check_evaluation(config.reward, root=root, output=study.out)
    print(describe(study, plans), flush=True)
    to_run = [plan.run for plan in plans if not plan.progress.is_finished]
    return 1 if trains and not train_runs(study, to_run, jobs=jobs) else 0


def select_runs(runs: list[RecipeRun], name: str | None) -> list[RecipeRun]:
    """Return the run of that name, or all runs if it is None.

    Raises ValueError for an unknown name.
    """
    chosen = [run for run in runs if name in (None, run.name)]
    if not chosen:
        raise ValueError(
            f"--only_cell must be a cell of the plan, such as {runs[0].name} (see --dry_run), got "
            f"{name}"
        )
    return chosen
