"""Write an HTML report of one run, or a comparison of several folders, as one file that needs no
network.

    python -m scripts.report outputs/run --output_path report.html
    python -m scripts.report outputs                                      # all runs below a folder
    python -m scripts.report outputs/run outputs/other outputs/guided outputs/study
    python -m scripts.report --videos outputs/videos [outputs/other ...]  # of generate.py, as outputs/videos/index.html

A comparison shows what the folders contain: runs, evaluations by scripts.evaluate (such as the
guided base model), analysis.json of a preference study, and videos of generate.py.
"""

from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.text import quote
from hyvideo.report.gallery import write_gallery
from hyvideo.report.page import REPORT_FILE, write_report


@exit_on_error("report.py", (ValueError, OSError))
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="FOLDER", help="runs and other folders to compare"
    )
    parser.add_argument(
        "--videos", type=Path, nargs="+", metavar="FOLDER", help="folders of videos, side by side"
    )
    parser.add_argument(
        "--output_path", dest="out", type=Path, help=f"HTML file to write (default: {REPORT_FILE})"
    )
    options = parser.parse_args()
    if bool(options.folders) == bool(options.videos):
        raise ValueError(
            "give either runs and other folders to compare, or --videos with folders of videos"
        )
    if options.videos and options.out:
        raise ValueError(
            "--output_path needs runs: --videos writes index.html to its first folder, got "
            f"{options.out}"
        )
    if options.out and options.out.suffix not in (".html", ".htm"):
        raise ValueError(
            f"--output_path must be an HTML file, got {quote(options.out)}; end it with .html, so "
            "that no file of a run is replaced"
        )
    if options.videos:
        print(f"written to {write_gallery(*options.videos)}")
    else:
        out = options.out or Path(REPORT_FILE)
        write_report(options.folders, out)
        print(f"written to {out}")


if __name__ == "__main__":
    main()
