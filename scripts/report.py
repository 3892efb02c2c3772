"""Write an HTML report of one run, or of several side by side, as one file that needs no network.

python -m scripts.report outputs/run [outputs/other ...] --out report.html
"""

from pathlib import Path

from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.evaluation.report.page import REPORT_FILE, write_report


@exit_on_error("report.py", (ValueError, OSError))
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=Path(REPORT_FILE), help="HTML file to write (report.html)")
    options = parser.parse_args()
    write_report(options.runs, options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
