"""Reproduce Table 2 of the paper, or its miniature on a CPU: train the cells, evaluate them, write
the table.

    python -m scripts.reproduce_table2 --world miniature --jobs 4                       all cells, four at a time
    python -m scripts.reproduce_table2 --world miniature --dry_run                      the predicted cost
    python -m scripts.reproduce_table2 --config configs/paper/table2_b_8gpu.yaml --num_gpus 8 \\
        --only_cell B-sage_grpo-dual_moving-eq-seed0                                    one job on a cluster
    python -m scripts.reproduce_table2 ... --only_table                                 the table of the finished cells

Interrupted cells resume and finished cells are skipped. Cells are named
<setting>-<method>-<kl>-eq|noeq-seed<k>. Writes to --output_dir: cells/, scores/, logs/, table2.md,
.csv and .tex, and comparisons.md with paired differences between rows. A verdict needs at least two
seeds; use five or more. The exit code is 1 if a cell failed.
"""

import sys

from hyvideo.files.cli import Parser, exit_on_error
from studies.tables.cells import KL_FLAGS, METHODS, grid
from studies.tables.study_command import add_grid_flags, grid_study, plan_and_train, select_runs


@exit_on_error("reproduce_table2.py")
def main() -> int:
    parser = Parser(__doc__)
    add_grid_flags(parser, makes="table")
    parser.set_defaults(methods=METHODS)
    parser.add_argument(
        "--kl",
        nargs="+",
        choices=list(KL_FLAGS),
        default=["none", "fixed", "dual_moving"],
        help="trust regions",
    )
    parser.add_argument(
        "--no_equalizer", action="store_true", help="also run every cell without the equalizer"
    )
    parser.add_argument(
        "--scorers",
        nargs="+",
        default=[],
        help="scorers of the table, e.g. videoalign clip pickscore",
    )
    options = parser.parse_args()
    study = grid_study(options, scorers=options.scorers)
    runs = grid(
        options.settings,
        options.methods,
        options.kl,
        options.seeds,
        no_equalizer=options.no_equalizer,
    )
    code = plan_and_train(study, runs, options)
    if options.dry_run:
        return code

    from studies.tables.table2 import evaluate_runs, write_results  # slow to import

    if options.only_cell:
        evaluate_runs(study, select_runs(runs, options.only_cell))
    else:
        write_results(study, runs)
        for name in ("table2.md", "comparisons.md"):
            print((study.out / name).read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main())
