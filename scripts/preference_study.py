"""A blind study of preference: docs/preference_study.md.

    python -m scripts.preference_study make --methods ours=videos/a theirs=videos/b --out study
    python -m scripts.preference_study make --methods base tuned=outputs/run --config run.yaml --out study
    python -m scripts.preference_study serve study        or with --static FOLDER, for raters without a server
    python -m scripts.preference_study analyse study      and --answers FILE ..., of such raters

A method is a folder of mp4 files, or a policy: `base`, a run's folder, a checkpoint, a LoRA. Policies make videos of
valid_video_csv now, under every flag of post_train.py.
"""

import argparse
import dataclasses
import socket
import sys
from pathlib import Path

from hyvideo.config.command_line import parse
from hyvideo.data.outside import Parser, refusals
from hyvideo.data.prompts import read_requests
from hyvideo.evaluation.figures.policies import PolicyComparison, read_policies
from hyvideo.evaluation.preference import analysis, server, study
from hyvideo.evaluation.preference.answers import Study
from hyvideo.models.reward_models.service.connections import make_server


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="writes the study's folder")
    make.add_argument("--methods", nargs="+", required=True, metavar="NAME=PATH", help="two or more; ours first")
    make.add_argument("--out", type=Path, required=True, help="folder of the study")
    for field in dataclasses.fields(study.Plan):
        make.add_argument(f"--{field.name}", type=int, default=field.default, **field.metadata)
    serve = commands.add_parser("serve", help="serves the raters' page")
    serve.add_argument("study", type=Path)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8010, help="0 takes a free one")
    serve.add_argument("--static", type=Path, help="folder: writes a page for each rater there instead")
    analyse = commands.add_parser("analyse", help="writes table3, analysis and pairs.csv")
    analyse.add_argument("study", type=Path)
    analyse.add_argument("--answers", type=Path, nargs="+", default=[], help="files of raters without a server")
    analyse.add_argument("--most_failed", type=float, default=0.5, help="share of checks that a rater may fail")
    options, flags = parser.parse_known_args()
    if flags and options.command != "make":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    return options, flags


@refusals("preference_study.py", (ValueError, OSError))
def main() -> int:
    options, flags = arguments()
    if options.command == "make":
        config = parse(flags).config
        plan = study.Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(study.Plan)})
        requests, methods = read_requests(*config.data.valid_video_csv), read_policies(options.methods)
        folders = study.folders_of_methods(PolicyComparison(config, methods, requests, options.out / "made"))
        tokens = study.make_study(options.out, folders, requests, plan)
        print(f"written to {options.out} for {len(tokens)} raters; next: serve {options.out}")
    elif options.command == "analyse":
        opened = Study(options.study)
        for path in options.answers:
            opened.add_file(path)
        print(analysis.analyse(opened, options.most_failed))
    elif options.static:
        print(*server.write_static(Study(options.study), options.static), sep="\n")
    else:
        opened = Study(options.study)
        with socket.create_server((options.host, options.port)) as listener:
            for token, rater in opened.raters.items():
                print(rater["name"], f"http://{options.host}:{listener.getsockname()[1]}/{token}/", flush=True)
            make_server(server.create_app(opened)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
