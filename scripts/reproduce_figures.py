"""Reproduce figures 3, 7 and 8 of the paper: train the runs that each figure needs, and draw it.

    python -m scripts.reproduce_figures --figures 7 --world miniature --jobs 2            the runs, then the figure
    python -m scripts.reproduce_figures --figures 3 7 8 --world miniature --dry_run       the predicted cost
    python -m scripts.reproduce_figures --figures 8 --config configs/paper/table2_b_8gpu.yaml --num_gpus 8 \\
        --only_cell B-sage_grpo-moving-eq-seed0                                           one job on a cluster
    python -m scripts.reproduce_figures ... --only_figure                                 figures of the finished runs

    3  every sampler without a KL term, with and without the equalizer
    7  SAGE-GRPO dual moving under three schedules of the KL coefficient: constant, two-stage, milder
    8  SAGE-GRPO under five trust regions: none, fixed, stepwise, moving, dual moving

--methods and --kl select others. The runs are cells of Table 2 or similar ones; finished ones are
not trained again. Writes cells/, logs/ and figures/ to --output_dir. The exit code is 1 if a cell
failed.
"""

import itertools
import sys

from hyvideo.data.cli import exit_on_error
from studies.recipes.runs import finished, reject_flags
from studies.tables.cells import FIGURES, KL_FLAGS, runs_of_figure
from studies.tables.study_command import grid_parser, grid_study, plan_and_train


@exit_on_error("reproduce_figures.py")
def main() -> int:
    parser = grid_parser(__doc__, makes="figure")
    parser.set_defaults(settings=["B"])
    numbers = list(FIGURES)
    parser.add_argument(
        "--figures", nargs="+", type=int, choices=numbers, default=numbers, help="figures to draw"
    )
    parser.add_argument(
        "--kl", nargs="+", choices=list(KL_FLAGS), help="trust regions instead of the figure's"
    )
    parser.add_argument(
        "--window", type=int, default=5, help="smooth curves over this many iterations"
    )
    options = parser.parse_args()
    if options.window < 1:
        raise ValueError(f"--window must be at least 1, got {options.window}")
    study = grid_study(options)
    if 7 in options.figures:
        reject_flags(study.extra, ["kl_schedule"])
    runs = {
        number: runs_of_figure(
            number, options.settings, options.seeds, methods=options.methods, kls=options.kl
        )
        for number in options.figures
    }
    code = plan_and_train(study, list(dict.fromkeys(itertools.chain(*runs.values()))), options)
    if options.dry_run or options.only_cell:
        return code

    from studies.figures.curves import find_runs  # slow to import
    from studies.figures.figures import draw

    for number, figure_runs in runs.items():
        trained = find_runs(map(study.folder, finished(study, figure_runs)))
        print(draw(number, trained, study.out / "figures", window=options.window))
    return code


if __name__ == "__main__":
    sys.exit(main())
