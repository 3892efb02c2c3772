"""Rehearse a run on a CPU before renting GPUs: your settings at their true sizes, with tiny models
of random weights.

    python -m scripts.rehearse --config configs/hunyuanvideo15_480p_8gpu.yaml [flags of post_train.py]

Needs no weights and no GPU. It builds a checkpoint of the released layout with minimal widths, and
runs the base model's validation, one iteration, a checkpoint, a restart with a second iteration, and
what follows a run: one generated video, an evaluation, a round of improvement on videos where the
config fine-tunes on them, an export and the report. Frames, sizes, steps, prompts and scorers are
true, on the fewest processes that have the layout of the run. It prints what it changed and what it
did not cover. Exit code: 0 if all stages passed, 1 if not, 2 for a usage error.
"""

import sys
from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.settings.command_line import parse


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        __doc__, prog="rehearse.py", usage="rehearse.py --config FILE.yaml [flags of post_train.py]"
    )
    parser.add_argument(
        "--world_size", type=int, help="GPUs of the run (default: from the name of the config)"
    )
    parser.add_argument(
        "--rehearsal_dir",
        type=Path,
        help="new or empty folder (default: outputs/rehearsal/<config>)",
    )
    options, flags = parser.parse_known_args(argv)
    command = parse(flags)
    from hyvideo.rehearsal.rehearsal import rehearse  # after the flags: it imports torch

    with exit_on_error("rehearse.py"):
        return rehearse(command.config, options.world_size, options.rehearsal_dir, " ".join(flags))


if __name__ == "__main__":
    sys.exit(main())
