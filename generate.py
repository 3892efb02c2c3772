"""Generate videos from prompts with a base model, a checkpoint of a training run, or a LoRA.

    generate.py --config configs/miniature.yaml --prompt "a red circle moves up"
    generate.py --checkpoint_path outputs/RUN/checkpoints/000030 --prompt "a red circle moves up"

A checkpoint is sampled with the settings of its run. With HunyuanVideo-1.5 in ./ckpts:

    generate.py --resolution 480p --prompt "a cat jumps"                              text to video
    generate.py --resolution 480p --prompt "the cat jumps" --image_path cat.png       image to video
    torchrun --nproc_per_node=8 generate.py --resolution 480p --valid_video_csv prompts.csv

Each video's settings are saved beside it as JSON. The same command again makes the videos that are
missing. Ignored flags of the public reference: docs/coming_from_other_code.md#flags-of-the-public-reference.
"""

import argparse
import signal
import sys

from hyvideo.files.text import shorten
from hyvideo.generation import flags
from hyvideo.settings import processes
from hyvideo.settings.reference_flags import with_flags


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the values of the flags."""
    return flags.parse(__doc__, argv)


def run(options: argparse.Namespace) -> list[str]:
    """Generate the videos; return the problems of those that best of n could not choose."""
    flags.convert_reference_flags(options)
    if not options.print_memory:
        flags.check(options)

    from hyvideo.generation import program  # after the checks of flags, which need less

    if options.print_memory:
        program.print_memory(options)
        return []
    return program.make_videos(options)


def exit_on_signal(number: int, _frame) -> None:
    """Exit by an exception, so that temporary files are deleted."""
    sys.exit(128 + number)


def main() -> int:
    from safetensors import SafetensorError

    processes.prepare()
    options = parse()
    try:
        problems = run(options)
    # the last is a full disk
    except (ValueError, OSError, FloatingPointError, SafetensorError) as error:
        print(f"generate.py: {shorten(with_flags(str(error), options.flags))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if problems:
        print(
            f"generate.py: no candidate of {len(problems)} videos has a reward, so the first one "
            "is kept; repeat the command to make these videos again",
            *problems,
            sep="\n",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, exit_on_signal)
    sys.exit(main())
