"""Table 2 of the paper from nothing, or in the miniature on a CPU: trains its cells, evaluates them, writes the table.

    python -m scripts.reproduce_table2 --world miniature --jobs 4                       all cells, four at a time
    python -m scripts.reproduce_table2 --world miniature --dry_run                      what that would cost
    python -m scripts.reproduce_table2 --config configs/hunyuanvideo15_480p_8gpu.yaml --num_gpus 8 \\
        --only_cell B-sage_grpo-dual_moving-eq-seed0                                    one job of a cluster
    python -m scripts.reproduce_table2 ... --only_table                                 of what is finished by now

A cell that has begun goes on where it stopped; a finished one is not run again. Cells are <setting>-<method>-<kl>-eq|
noeq-seed<k>. Leaves cells/, scores/, logs/, results.json, table2.md, .csv and .tex, and paired differences between its
rows, comparisons.md, in --out. A verdict takes two seeds at least, and five to be worth much. Ends with 1 when a cell
failed.
"""

import argparse
import sys
from pathlib import Path

from hyvideo.data.outside import refusals
from hyvideo.evaluation.table2.runs import KL_FLAGS, METHODS, SETTINGS, Study, grid, split_extra
from hyvideo.evaluation.table2.train_runs import check_scorers, describe, plan_run, train_runs

WORLDS = {"miniature": "configs/miniature.yaml"}
MINIATURE_NOISE = "sage_grpo:0.7"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--world", choices=list(WORLDS), help="a world that needs no download")
    where.add_argument("--config", help="YAML of a run, with valid_video_csv")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="reward weights")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--kl", nargs="+", choices=list(KL_FLAGS), default=["none", "fixed", "dual_moving"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--no_equalizer", action="store_true", help="also every cell without the equalizer")
    parser.add_argument(
        "--match_noise",
        help=f"sde_type:eta whose total noise every sampler gets; {MINIATURE_NOISE} with --world, none with --config; "
        '"" is none',
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/table2"))
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time on this machine")
    parser.add_argument("--num_gpus", type=int, default=0, help="processes of torchrun for each cell; 0 is without")
    parser.add_argument("--scorers", nargs="+", default=[], help="measure with these: videoalign clip pickscore")
    parser.add_argument("--extra", default="", help='flags of post_train.py for every cell: "max_steps 30 eta 0.5"')
    parser.add_argument("--only_cell", metavar="NAME", help="train and evaluate this cell, write no table")
    parser.add_argument("--only_table", action="store_true", help="train nothing, write the table of what is finished")
    parser.add_argument("--dry_run", action="store_true", help="print the plan and its cost, write nothing")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    if options.jobs < 1 or (options.num_gpus and options.jobs > 1):
        raise ValueError(f"--jobs must be at least 1, and 1 with --num_gpus, got {options.jobs}")
    noise = options.match_noise
    study = Study(
        config_file=WORLDS[options.world] if options.world else options.config,
        out=options.out,
        extra=split_extra(options.extra),
        match_noise=(MINIATURE_NOISE if options.world else "") if noise is None else noise,
        num_gpus=options.num_gpus,
        scorers=options.scorers,
    )
    runs = grid(options.settings, options.methods, options.kl, options.seeds, no_equalizer=options.no_equalizer)
    if options.only_cell:
        chosen = [run for run in runs if run.name == options.only_cell]
        if not chosen:
            raise ValueError(f"--only_cell must name a cell of the plan, such as {runs[0].name}; --dry_run lists them")
        runs = chosen
    plans = [plan_run(study, run) for run in runs]
    check_scorers(study)
    print(describe(study, plans), flush=True)
    if options.dry_run:
        return 0
    to_run = [plan.run for plan in plans if not plan.progress.is_finished]
    failed = {} if options.only_table else train_runs(study, to_run, jobs=options.jobs)

    from hyvideo.evaluation.table2.evaluate_runs import evaluate_runs, write_results  # what is heavy, only now

    if options.only_cell:
        evaluate_runs(study, runs)
    else:
        write_results(study, runs)
        for name in ("table2.md", "comparisons.md"):
            print((study.out / name).read_text(encoding="utf-8"))
    for run, log in failed.items():
        print(f"failed: {run.name}, see {log}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    options = parse()
    with refusals("reproduce_table2.py"):
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
