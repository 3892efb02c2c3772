"""Run a blind preference study with human raters: docs/ratings.md#blind-preference-study.

python -m scripts.preference_study make study --methods ours=videos/a theirs=videos/b
python -m scripts.preference_study make study --methods base tuned=outputs/run --config run.yaml
python -m scripts.preference_study serve study
python -m scripts.preference_study analyze study
"""

import argparse
import shlex
import sqlite3
from contextlib import suppress
from pathlib import Path

from hyvideo.data.prompts import read_requests
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.http_guard import listen, make_server
from hyvideo.files.text import quote
from hyvideo.ratings.rating import DATABASE, VIDEOS, Study, create_app
from hyvideo.settings import processes
from hyvideo.settings.command_line import parse
from scripts import compare_policies


def make(options: argparse.Namespace, flags: list[str]) -> None:
    requests = read_requests(*parse(flags).config.data.valid_video_csv)
    generated = options.study / "made"
    old = [quote(path) for name in (VIDEOS, DATABASE) for path in options.study.glob(f"{name}*")]
    if old:
        raise ValueError(
            f"the folder already contains a study: delete {', '.join(old)}, or choose another "
            "folder"
        )

    # slow to import
    from hyvideo.ratings.study import clips_of, default_pairs, design, make_study

    paths = dict(word.partition("=")[::2] for word in options.methods)
    if not 2 <= len(paths) == len(options.methods) or not all(
        Path(path).exists() for path in paths.values()
    ):
        given = " ".join(map(quote, options.methods))
        raise ValueError(
            "--methods needs two or more different names: base or an existing NAME=PATH, got "
            f"{given}"
        )
    folders = {
        name: Path(path) for name, path in paths.items() if path and any(Path(path).glob("*.mp4"))
    }
    policies = [word for word in options.methods if word.partition("=")[0] not in folders]
    if policies:
        pairs = options.pairs or default_pairs(2, len(requests))
        # raises before hours of sampling
        design(len(paths), pairs, raters=options.raters, pairs=pairs)
        reject_earlier_videos(generated, list(paths), num_videos=min(pairs, len(requests)))
        compare_policies.main(
            ["--policies", *policies, f"--num_prompts={pairs}", f"--output_dir={generated}", *flags]
        )
    # under torchrun, all processes generate videos and the main one writes the study
    if processes.rank() > 0:
        return
    pairs = make_study(
        options.study,
        {name: clips_of(folders.get(name, generated / name), requests) for name in paths},
        raters=options.raters,
        pairs=options.pairs,
    )
    serving = f"python -m scripts.preference_study serve {shlex.quote(str(options.study))}"
    print(
        f"wrote a study to {options.study}, raters: {options.raters}, pairs of each: {pairs}; "
        f"next: {serving}"
    )


def reject_earlier_videos(generated: Path, methods: list[str], *, num_videos: int) -> None:
    """Raise ValueError if a method's folder has videos that ``make`` would rate, but not
    replace.
    """
    names = {f"{number:04d}.mp4" for number in range(num_videos)}
    for method in methods:
        for path in sorted((generated / method).glob("*.mp4")):
            if path.name not in names:
                raise ValueError(
                    f"the study would include {quote(path)}, a video of an earlier one; delete "
                    f"{quote(generated)}, or choose another folder"
                )


def serve(study: Study, host: str, port: int) -> None:
    listener, url = listen(host, port)
    with suppress(KeyboardInterrupt), listener:
        for token, rater in study.raters.items():
            print(rater["name"], f"{url}/{token}/", flush=True)
        make_server(create_app(study)).run(sockets=[listener])


@exit_on_error("preference_study.py", (ValueError, OSError, OverflowError, sqlite3.Error))
def main() -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="create a study")
    making.add_argument(
        "--methods", nargs="+", required=True, help="ours first: base, NAME=videos or NAME=policy"
    )
    making.add_argument("--raters", type=int, default=10, help="number of raters")
    making.add_argument(
        "--pairs",
        type=int,
        help="pairs per rater (default: 20, or all if fewer)",
    )
    serving = commands.add_parser("serve", help="serve the rating pages")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serving.add_argument(
        "--port", type=int, default=8010, help="port to listen on; 0 picks a free one"
    )
    analyzing = commands.add_parser("analyze", help="write the win rates and pairs.csv")
    for command in (making, serving, analyzing):
        command.add_argument("study", type=Path, help="folder of the study")
    options, flags = parser.parse_known_args()
    if options.command == "make":
        return make(options, flags)
    options = parser.parse_args()
    study = Study(options.study)
    if options.command == "analyze":
        from hyvideo.ratings.analysis import analyze

        print(analyze(study))
    else:
        study.require_videos()
        serve(study, options.host, options.port)


if __name__ == "__main__":
    main()
