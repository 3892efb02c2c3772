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

import sys

from hyvideo.data.outside import refusals
from hyvideo.evaluation.studies.cells import KL_FLAGS, METHODS, grid
from hyvideo.evaluation.studies.study_command import grid_parser, grid_study, named, plan_and_train


@refusals("reproduce_table2.py")
def main() -> int:
    parser = grid_parser(__doc__, makes="table")
    parser.set_defaults(methods=METHODS)
    parser.add_argument("--kl", nargs="+", choices=list(KL_FLAGS), default=["none", "fixed", "dual_moving"])
    parser.add_argument("--no_equalizer", action="store_true", help="also every cell without the equalizer")
    parser.add_argument("--scorers", nargs="+", default=[], help="measure with these: videoalign clip pickscore")
    options = parser.parse_args()
    study = grid_study(options, scorers=options.scorers)
    runs = grid(options.settings, options.methods, options.kl, options.seeds, no_equalizer=options.no_equalizer)
    code = plan_and_train(study, runs, options)
    if options.dry_run:
        return code

    from hyvideo.evaluation.studies.table2 import evaluate_runs, write_results  # what is heavy, only now

    if options.only_cell:
        evaluate_runs(study, named(runs, options.only_cell))
    else:
        write_results(study, runs)
        for name in ("table2.md", "comparisons.md"):
            print((study.out / name).read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main())
