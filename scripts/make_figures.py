"""Draw figures 3, 4, 7, 8 and 9 of the paper from runs: ``python -m scripts.make_figures RUN... --output_dir DIR``.

    python -m scripts.make_figures outputs/miniature --output_dir outputs/figures     the learning curve of a run
    python -m scripts.make_figures outputs/table2/cells --output_dir outputs/figures  all runs in a folder
    python -m scripts.make_figures --output_dir outputs/figures                       figures 4 and 9, which need no run

Runs are grouped by the settings in their config.yaml. Curves are means over seeds, with a band of one standard
deviation. A figure for which the runs are missing is skipped, with the reason.
"""

from pathlib import Path

from hyvideo.data.outside import Parser, exit_on_error, read_json

THEORY_ONLY = "theory only: pass measured norms of examples.gradient_norms with --gradients"


@exit_on_error("make_figures.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of one run or of several")
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    words = "figures of the paper; 0 is the learning curve of one run or of the seeds of one setting"
    numbers = [0, 3, 4, 7, 8, 9]
    parser.add_argument("--figures", nargs="+", type=int, choices=numbers, default=numbers, help=words)
    parser.add_argument(
        "--gradients", nargs="+", type=Path, default=[], help="JSON files of examples.gradient_norms (figure 4)"
    )
    parser.add_argument("--window", type=int, default=5, help="smooth curves over this many iterations")
    options = parser.parse_args()
    if options.window < 1:
        raise ValueError(f"--window must be at least 1, got {options.window}")

    from hyvideo.evaluation.figures.curves import find_runs
    from hyvideo.evaluation.figures.figures import draw

    runs = find_runs(options.runs)
    measured = [read_measured(path) for path in options.gradients]
    for number in options.figures:
        hint = f" ({THEORY_ONLY})" if number == 4 and not measured else ""
        print(draw(number, runs, options.output_dir, window=options.window, measured=measured) + hint)


def read_measured(path: Path) -> dict:
    """Return the content of a file of examples.gradient_norms. Raises ValueError for any other file."""
    content = read_json(path, "--gradients")
    if not {"sde_type", "num_steps", "steps"} <= content.keys():
        raise ValueError(f"--gradients must be JSON files of examples.gradient_norms, got {path}")
    return content


if __name__ == "__main__":
    main()
