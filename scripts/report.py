"""Write an HTML report of one run, or of several side by side, as one file that needs no network.

python -m scripts.report outputs/run [outputs/other ...] --output_path report.html
python -m scripts.report --videos outputs/videos [outputs/other]   # of generate.py, as outputs/videos/index.html
"""

from pathlib import Path

from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.evaluation.report.gallery import write_gallery
from hyvideo.evaluation.report.page import REPORT_FILE, write_report


@exit_on_error("report.py", (ValueError, OSError))
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--videos", type=Path, nargs="+", metavar="FOLDER", help="one or two folders of videos")
    parser.add_argument("--output_path", type=Path, help=f"HTML file to write (default: {REPORT_FILE})")
    options = parser.parse_args()
    if bool(options.runs) == bool(options.videos) or len(options.videos or ()) > 2:
        raise ValueError("give either one or several runs, or --videos with one or two folders")
    if options.videos and options.output_path:
        raise ValueError(
            f"--output_path needs runs: --videos writes index.html into its first folder, got {options.output_path}"
        )
    if options.videos:
        out = write_gallery(*options.videos)
    else:
        write_report(options.runs, out := options.output_path or Path(REPORT_FILE))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
