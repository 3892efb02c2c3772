"""Figures 3, 4, 7, 8 and 9 of the paper from runs: ``python -m scripts.make_figures RUN... --out DIR``.

    python -m scripts.make_figures outputs/miniature --out outputs/figures         the learning curve of a run
    python -m scripts.make_figures outputs/table2/cells --out outputs/figures      every run below the folder
    python -m scripts.make_figures --out outputs/figures                           4 and 9, which need no run

Runs are grouped by the settings in their config.yaml; seeds of one setting are averaged, the band is one standard
deviation over them. A figure that the runs do not allow is not made, and a line says why.
"""

from pathlib import Path

from hyvideo.data.outside import Parser, parse_json, refusals

THEORY_ALONE = "theory alone: give norms that scripts/measure_gradient_norms.py measured by --gradients"


@refusals("make_figures.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run, or of runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    words = "of the paper; 0 is the learning curve of a run, or of the seeds of one setting"
    numbers = [0, 3, 4, 7, 8, 9]
    parser.add_argument("--figures", nargs="+", type=int, choices=numbers, default=numbers, help=words)
    parser.add_argument(
        "--gradients", nargs="+", type=Path, default=[], help="JSON of scripts.measure_gradient_norms, for figure 4"
    )
    parser.add_argument("--window", type=int, default=5, help="iterations of which a point of a curve is the mean; 5")
    options = parser.parse_args()
    if options.window < 1:
        raise ValueError(f"--window must be at least 1, got {options.window}")

    from hyvideo.evaluation.figures.curves import find_runs
    from hyvideo.evaluation.figures.figures import draw

    runs = find_runs(options.runs)
    measured = [read_measured(path) for path in options.gradients]
    for number in options.figures:
        hint = f" ({THEORY_ALONE})" if number == 4 and not measured else ""
        print(draw(number, runs, options.out, window=options.window, measured=measured) + hint)


def read_measured(path: Path) -> dict:
    """Content of the file of measure_gradient_norms. Raises ValueError for another file."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"sde_type", "num_steps", "steps"} <= content.keys():
            raise ValueError("it is another file")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--gradients must name JSON of scripts.measure_gradient_norms, got {path}: {error}"
        ) from error
    return content


if __name__ == "__main__":
    main()
