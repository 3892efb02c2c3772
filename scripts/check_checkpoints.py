"""Lists which checkpoints are there or broken, and what can be run: ``python -m scripts.check_checkpoints ckpts``.

Looks at headers, never at weights, so it takes seconds. Ends with 0 when a transformer, the VAE and the text encoder
are complete, with 1 when they are not, and with 2 when it was called wrongly.
"""

import argparse
import sys
from pathlib import Path

# So that the file can be run by its path, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("root", nargs="?", type=Path, default=Path("ckpts"), help="the checkpoint folder; ckpts")
    root = parser.parse_args().root
    if root.exists() and not root.is_dir():
        parser.error(f"{root} is a file; give the folder that holds transformer/, vae/ and text_encoder/")

    from hyvideo.models.download_check.report import lines, report  # after --help: it imports torch

    checkpoints = report(root)
    print("\n".join(lines(checkpoints)))
    return 0 if checkpoints.has_a_model else 1


if __name__ == "__main__":
    sys.exit(main())
