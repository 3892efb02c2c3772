"""Draw figures 3, 7 and 8 of the paper from runs.

    python -m scripts.make_figures outputs/miniature --output_dir outputs/figures     the learning curve of a run
    python -m scripts.make_figures outputs/table2/cells --output_dir outputs/figures  all runs in a folder

Runs are grouped by the settings in their config.yaml. Curves are means over seeds, with a band of
one standard deviation. A figure for which the runs are missing is skipped, with the reason.
examples.sampler_figures draws figures 4 and 9, which need no run.
"""

from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error


@exit_on_error("make_figures.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of one run or of several"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    numbers = [0, 3, 7, 8]
    parser.add_argument(
        "--figures",
        nargs="+",
        type=int,
        choices=numbers,
        default=numbers,
        help="figures of the paper; 0 is the learning curve of one run or of the seeds of one "
        "setting",
    )
    parser.add_argument(
        "--window", type=int, default=5, help="smooth curves over this many iterations"
    )
    options = parser.parse_args()
    if options.window < 1:
        raise ValueError(f"--window must be at least 1, got {options.window}")

    from studies.figures.curves import find_runs
    from studies.figures.figures import draw

    runs = find_runs(options.runs)
    for number in options.figures:
        print(draw(number, runs, options.output_dir, window=options.window))


if __name__ == "__main__":
    main()
