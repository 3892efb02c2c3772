"""Report which checkpoints are complete, missing or corrupted, and what can be run with them.

Usage: ``python -m scripts.check_checkpoints ckpts``. Reads file headers only, which takes seconds.
Exit code: 0 if text-to-video or image-to-video can run, 1 if not, 2 for a usage error.
"""

import argparse
import sys
from pathlib import Path

# Allows running the file by its path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hyvideo.data.files import folder_problem
from hyvideo.data.text import quote


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "root",
        nargs="?",
        type=Path,
        default=Path("ckpts"),
        help="checkpoint folder (default: ckpts)",
    )
    parser.add_argument(
        "--family", default="", help="folder or module of a model family outside the repository"
    )
    options = parser.parse_args()
    root = options.root
    problem = folder_problem(root)
    # the report names what to download into a new folder
    if problem and problem != "it does not exist":
        parser.error(
            "root must be the folder that contains transformer/, vae/ and text_encoder/, got "
            f"{quote(root)}: {problem}"
        )

    # imports torch, which --help does not need
    from hyvideo.checks.download_check.report import lines, report
    from hyvideo.models.registry import register

    try:
        register(options.family)
    except ValueError as error:
        parser.error(str(error))
    checkpoints = report(root)
    print("\n".join(lines(checkpoints)))
    return 0 if checkpoints.has_a_model else 1


if __name__ == "__main__":
    sys.exit(main())
