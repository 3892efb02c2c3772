"""Write an HTML report of one run, or a comparison of several folders, as one file that needs no
network.

    python -m scripts.report outputs/run --output_path report.html
    python -m scripts.report outputs/run outputs/other outputs/guided outputs/vbench outputs/study
    python -m scripts.report --videos outputs/videos [outputs/other ...]  # of generate.py, as outputs/videos/index.html
    python -m scripts.report --serve outputs                              # all runs in a folder, while they train

A comparison shows what the folders contain: runs, evaluations by scripts.evaluate (such as the
guided base model), benchmarks.json, analysis.json of a preference study, and videos of generate.py.

--serve shows the runs in a browser until Ctrl+C, refreshes the pages and writes no file. It listens
on this machine only; from another one, use "ssh -L 8100:localhost:8100 MACHINE" and open
http://localhost:8100. On another address (--host), every request needs the token that is printed,
or the one in the environment variable REPORT_TOKEN.
"""

from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.text import quote
from hyvideo.report.gallery import write_gallery
from hyvideo.report.page import REPORT_FILE, write_report

DEFAULT_PORT = 8100


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
        "--serve", type=Path, metavar="FOLDER", help="folder with runs, to serve to a browser"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that --serve listens on")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port of --serve; 0: a free one",
    )
    parser.add_argument(
        "--output_path", dest="out", type=Path, help=f"HTML file to write (default: {REPORT_FILE})"
    )
    options = parser.parse_args()
    if sum(map(bool, (options.folders, options.videos, options.serve))) != 1:
        raise ValueError(
            "give either runs and other folders to compare, or --videos with folders of videos, or "
            "--serve with a folder of runs"
        )
    if options.videos and options.out:
        raise ValueError(
            "--output_path needs runs: --videos writes index.html to its first folder, got "
            f"{options.out}"
        )
    if options.serve and options.out:
        raise ValueError(f"--output_path needs runs: --serve writes no file, got {options.out}")
    if options.out and options.out.suffix not in (".html", ".htm"):
        raise ValueError(
            f"--output_path must be an HTML file, got {quote(options.out)}; end it with .html, so "
            "that no file of a run is replaced"
        )
    if options.serve:
        serve(options.serve, options.host, options.port)
    elif options.videos:
        print(f"written to {write_gallery(*options.videos)}")
    else:
        out = options.out or Path(REPORT_FILE)
        write_report(options.folders, out)
        print(f"written to {out}")


def serve(folder: Path, host: str, port: int) -> None:
    """Serve the runs of a folder until Ctrl+C."""
    from hyvideo.report.serve import Library, Server, find_runs

    library = Library(folder)
    try:
        server = Server(library, host, port)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error}; choose another --port"
        ) from error
    print(f"reading {len(find_runs(library.folder))} runs of {folder}", flush=True)
    library.page("all", "")  # so that the first page opens at once
    print(f"open {server.url} (Ctrl+C ends)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
