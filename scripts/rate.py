"""Rate your own videos in a browser, to train a model on your answers: docs/ratings.md.

    python -m scripts.rate STUDY --config C --prompts_csv P [flags of generate.py]   pairs, for objective dpo
    python -m scripts.rate STUDY --keep true --videos FOLDER                         single videos, for objective sft

STUDY is a new folder. Two videos of each prompt are sampled, or those of --videos are taken. Each
answer is written at once, to `pairs.csv` or `videos.csv` in STUDY. The same command, or STUDY alone,
continues.
"""

import argparse
import os
import sqlite3
import sys
from pathlib import Path

from hyvideo.data.prompts import read_requests
from hyvideo.files.cli import Parser, exit_on_error, exit_on_interrupt, truth
from hyvideo.files.files import find_path, folder_problem
from hyvideo.files.text import quote
from hyvideo.generation import flags as generation
from hyvideo.settings.command_line import read_settings


def make_parser() -> Parser:
    parser = Parser(__doc__, usage="rate.py STUDY [--config C --prompts_csv P] [flags]")
    parser.add_argument("study", type=Path, help="folder of the study")
    parser.add_argument(
        "--keep",
        type=truth,
        nargs="?",
        const=True,
        default=False,
        help="show single videos, each to keep or to drop, and not pairs",
    )
    parser.add_argument("--config", type=Path, help="YAML of a run; samples its model")
    parser.add_argument("--prompts_csv", type=Path, nargs="+", default=[], help="prompts to sample")
    parser.add_argument("--videos", type=Path, help="folder of existing videos, which are rated")
    parser.add_argument(
        "--num_videos", type=int, help="sampled videos per prompt (default: 2, with --keep 4)"
    )
    parser.add_argument(
        "--questions",
        nargs="+",
        default=[],
        metavar="NAME=TEXT",
        help="questions about each pair (default: one question, Overall)",
    )
    parser.add_argument("--raters", type=int, default=1, help="people, each with a link")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=8010, help="port to listen on; 0 picks a free one"
    )
    parser.add_argument(
        "--no_browser", action="store_true", help="print the link, and open no browser"
    )
    return parser


def questions_of(words: list[str]) -> dict[str, str]:
    """Return the text of each question by its name. Raises ValueError for other words."""
    questions = {}
    for word in words:
        name, _, text = word.partition("=")
        if not name.strip() or not text.strip() or name in questions:
            raise ValueError(
                f"--questions must be NAME=TEXT with different names, got {quote(word)}; write for "
                'example --questions "MOTION=In which video is the motion smoother?"'
            )
        questions[name] = text
    return questions


def absolute(path: Path | None) -> str:
    return os.path.abspath(find_path(path)) if path else ""


def rate(options: argparse.Namespace, flags: list[str]) -> None:
    if options.study.is_file():
        raise ValueError(
            f"STUDY must be a folder and the first word, got the file {quote(options.study)}"
        )
    questions = questions_of(options.questions)
    if options.config:
        read_settings(options.config)
    if options.prompts_csv:
        read_requests(*options.prompts_csv)
    problem = folder_problem(options.videos) if options.videos else None
    if problem:
        raise ValueError(f"--videos must be a folder, got {quote(options.videos)}: {problem}")

    from hyvideo.ratings import own_videos  # after the flags: it imports torch

    given = own_videos.RatingPlan(
        keep=options.keep,
        videos=absolute(options.videos),
        config=absolute(options.config),
        prompts_csv=[absolute(path) for path in options.prompts_csv],
        num_videos=options.num_videos,
        questions=questions,
        raters=options.raters,
        flags=flags,
    )
    folder = options.study.resolve()
    plan = own_videos.continued(given, folder)
    address = own_videos.Address(options.host, options.port, not options.no_browser)
    if plan.keep:
        own_videos.rate_single(plan, folder, address)
    else:
        own_videos.rate_pairs(plan, folder, address)


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this program, and those of generate.py, which are needed to sample."""
    parser = make_parser()
    options, flags = parser.parse_known_args()
    if not options.prompts_csv or options.videos:
        return parser.parse_args(), []
    generation.parse(__doc__, [*flags, "--prompt", "checks the flags before hours of sampling"])
    return options, flags


@exit_on_interrupt("rate.py")
def main() -> int:
    options, flags = read_arguments()
    with exit_on_error("rate.py", (ValueError, OSError, OverflowError, sqlite3.Error)):
        rate(options, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
