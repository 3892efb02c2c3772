"""The console command of an installed copy:

sage-grpo post_train --config configs/miniature.yaml
sage-grpo generate --prompt "a red circle moves up"
sage-grpo evaluate --config configs/miniature.yaml --output_dir outputs/scores
"""

import runpy
import sys

from hyvideo.files.files import ROOT


def main() -> None:
    """Run the program that the first argument names, with the others."""
    programs = {name: name for name in ("post_train", "generate")}
    for path in sorted((ROOT / "scripts").glob("*.py")):
        if "def main(" in path.read_text(encoding="utf-8"):
            programs[path.stem] = f"scripts.{path.stem}"
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in programs:
        print(f"usage: sage-grpo PROGRAM [flags]\nprograms: {', '.join(programs)}")
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    del sys.argv[1]
    sys.path.insert(0, str(ROOT))
    runpy.run_module(programs[name], run_name="__main__", alter_sys=True)
