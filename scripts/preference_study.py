"""A blind study of preference: docs/preference_study.md.

    python -m scripts.preference_study make study --methods ours=videos/a theirs=videos/b
    python -m scripts.preference_study make study --methods base tuned=outputs/run --config run.yaml
    python -m scripts.preference_study serve study        or with --static FOLDER, for raters without a server
    python -m scripts.preference_study analyse study      and --answers FILE ..., of such raters

A method is a folder of mp4 files, or a policy as of scripts.compare_policies, which makes its videos of
valid_video_csv now, under every flag of post_train.py.
"""

import argparse
import socket
from pathlib import Path

from hyvideo.config.command_line import parse
from hyvideo.data.outside import Parser, refusals, shown
from hyvideo.data.prompts import read_requests
from hyvideo.evaluation.preference.answers import Study
from scripts import compare_policies


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="writes the study's folder")
    make.add_argument("--methods", nargs="+", required=True, metavar="NAME=PATH", help="two or more; ours first")
    make.add_argument("--raters", type=int, default=10, help="people who are invited; 10")
    make.add_argument("--pairs", type=int, default=20, help="of each rater, beside the checks; 20")
    make.add_argument("--checks", type=int, default=2, help="pairs that come again, and clips beside themselves; 2")
    serve = commands.add_parser("serve", help="serves the raters' page")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1")
    serve.add_argument("--port", type=int, default=8010, help="0 takes a free one; 8010")
    serve.add_argument("--static", type=Path, help="folder: writes a page for each rater there instead")
    analyse = commands.add_parser("analyse", help="writes table3, analysis and pairs.csv")
    analyse.add_argument("--answers", type=Path, nargs="+", default=[], help="files of raters without a server")
    analyse.add_argument("--most_failed", type=float, default=0.5, help="share of checks that a rater may fail; 0.5")
    for command in (make, serve, analyse):
        command.add_argument("study", type=Path, help="folder of the study")
    options, flags = parser.parse_known_args()
    return (options, flags) if options.command == "make" else (parser.parse_args(), [])


def make(options: argparse.Namespace, flags: list[str]) -> None:
    requests, made = read_requests(*parse(flags).config.data.valid_video_csv), options.study / "made"
    if (videos := options.study / "videos").exists():
        raise ValueError(f"a study needs a folder of its own; delete {shown(videos)}, or take another")

    from hyvideo.evaluation.preference.study import design, make_study  # what is heavy, only now

    sizes = {name: getattr(options, name) for name in ("raters", "pairs", "checks")}
    words = {word.partition("=")[0]: word for word in options.methods}
    folders = {name: Path(word.partition("=")[2] or made / name) for name, word in words.items()}
    if policies := {name: made / name for name, folder in folders.items() if not any(folder.glob("*.mp4"))}:
        design(len(words), options.pairs, **sizes)  # refused now, not after hours
        asked = ["--policies", *map(words.get, policies), "--num_prompts", str(options.pairs)]
        compare_policies.main([*asked, "--out", str(made), *flags])
    make_study(options.study, folders | policies, requests, **sizes)
    print(f"written to {options.study} for {options.raters} raters; next: serve {options.study}")


def serve(study: Study, host: str, port: int) -> None:
    from hyvideo.evaluation.preference.server import create_app
    from hyvideo.models.reward_models.service.connections import make_server

    shown_host, family = (f"[{host}]", socket.AF_INET6) if ":" in host else (host, socket.AF_INET)
    with socket.create_server((host, port), family=family) as listener:
        for token, rater in study.raters.items():
            print(rater["name"], f"http://{shown_host}:{listener.getsockname()[1]}/{token}/", flush=True)
        make_server(create_app(study)).run(sockets=[listener])


@refusals("preference_study.py", (ValueError, OSError, OverflowError))
def main() -> None:
    options, flags = arguments()
    if options.command == "make":
        make(options, flags)
    elif options.command == "analyse":
        from hyvideo.evaluation.preference.analysis import analyse

        study = Study(options.study)
        for path in options.answers:
            study.add(path.read_bytes())
        print(analyse(study, options.most_failed))
    elif options.static:
        from hyvideo.evaluation.preference.server import write_static

        write_static(Study(options.study), options.static)
    else:
        serve(Study(options.study), options.host, options.port)


if __name__ == "__main__":
    main()
