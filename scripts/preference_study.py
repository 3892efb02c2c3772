"""A blind study of preference: docs/preference_study.md.

python -m scripts.preference_study make study --methods ours=videos/a theirs=videos/b
python -m scripts.preference_study make study --methods base tuned=outputs/run --config run.yaml
python -m scripts.preference_study serve study        or with --static FOLDER, for raters without a server
python -m scripts.preference_study analyse study      and --answers FILE ..., of such raters
"""

import argparse
import socket
import sqlite3
from contextlib import suppress
from pathlib import Path

from hyvideo.config.command_line import parse
from hyvideo.data.outside import Parser, refusals, shown
from hyvideo.data.prompts import read_requests
from hyvideo.evaluation.preference.rating import DATABASE, VIDEOS, Study, create_app
from hyvideo.models.reward_models.service.connections import make_server
from scripts import compare_policies


def make(options: argparse.Namespace, flags: list[str]) -> None:
    requests, made = read_requests(*parse(flags).config.data.valid_video_csv), options.study / "made"
    if old := [shown(path) for name in (VIDEOS, DATABASE) for path in options.study.glob(f"{name}*")]:
        raise ValueError(f"a study needs a folder of its own; delete {', '.join(old)}, or take another")

    from hyvideo.evaluation.preference.study import design, make_study  # what is heavy, only now

    sizes = {name: getattr(options, name) for name in ("raters", "pairs", "checks")}
    paths = dict(word.partition("=")[::2] for word in options.methods)
    if not 2 <= len(paths) == len(options.methods) or not all(Path(path).exists() for path in paths.values()):
        given = " ".join(map(shown, options.methods))
        raise ValueError(f"--methods takes two different names or more, of what exists or base, got {given}")
    folders = {name: Path(path) for name, path in paths.items() if path and any(Path(path).glob("*.mp4"))}
    if policies := [word for word in options.methods if word.partition("=")[0] not in folders]:
        design(len(paths), options.pairs, **sizes)  # refused now, not after hours
        compare_policies.main(["--policies", *policies, f"--num_prompts={options.pairs}", f"--out={made}", *flags])
    make_study(options.study, {name: folders.get(name, made / name) for name in paths}, requests, **sizes)
    print(f"written to {options.study} for {options.raters} raters; next: serve {options.study}")


def serve(study: Study, host: str, port: int) -> None:
    shown_host, family = (f"[{host}]", socket.AF_INET6) if ":" in host else (host, socket.AF_INET)
    with suppress(KeyboardInterrupt), socket.create_server((host, port), family=family) as listener:
        for token, rater in study.raters.items():
            print(rater["name"], f"http://{shown_host}:{listener.getsockname()[1]}/{token}/", flush=True)
        make_server(create_app(study)).run(sockets=[listener])


@refusals("preference_study.py", (ValueError, OSError, OverflowError, sqlite3.Error))
def main() -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="writes the study's folder")
    making.add_argument("--methods", nargs="+", required=True, help="ours first: NAME=folder, NAME=policy or base")
    making.add_argument("--raters", type=int, default=10, help="people who are invited; 10")
    making.add_argument("--pairs", type=int, default=20, help="of each rater, beside the checks; 20")
    making.add_argument("--checks", type=int, default=2, help="pairs that come again, and clips beside themselves; 2")
    serving = commands.add_parser("serve", help="serves the raters' page")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1")
    serving.add_argument("--port", type=int, default=8010, help="0 takes a free one; 8010")
    serving.add_argument("--static", type=Path, help="folder: writes a page for each rater there instead")
    analysing = commands.add_parser("analyse", help="writes table3, analysis and pairs.csv")
    analysing.add_argument("--answers", type=Path, nargs="+", default=[], help="files of raters without a server")
    analysing.add_argument("--most_failed", type=float, default=0.5, help="share of checks that a rater may fail; 0.5")
    for command in (making, serving, analysing):
        command.add_argument("study", type=Path, help="folder of the study")
    options, flags = parser.parse_known_args()
    if options.command == "make":
        return make(options, flags)
    options = parser.parse_args()
    study = Study(options.study)
    if options.command == "analyse":
        from hyvideo.evaluation.preference.analysis import analyse

        for path in options.answers:
            with refusals(f"preference_study.py: {path}"):
                study.add(path.read_bytes())
        print(analyse(study, options.most_failed))
    elif options.static:
        study.write_pages(options.static)
        print(f"written to {options.static}: a folder for each of {len(study.raters)} raters")
    else:
        serve(study, options.host, options.port)


if __name__ == "__main__":
    main()
