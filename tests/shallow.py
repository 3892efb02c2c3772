"""A copy of the miniature with two of its four transformer blocks, for runs whose length does not
matter.

The folder `SHALLOW` has a configuration without weights, for runs with random weights.
"""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

SHALLOW = "tests/shallow_miniature"
ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "transformer/miniature/diffusion_pytorch_model.safetensors"


def write_trained(root: Path) -> str:
    """Write the shallow miniature with the miniature's weights to ``root``, and return it."""
    source = ROOT / SHALLOW
    (root / WEIGHTS).parent.mkdir(parents=True)
    text = (source / "transformer" / "miniature" / "config.json").read_text()
    (root / "transformer" / "miniature" / "config.json").write_text(text)
    prefixes = tuple(
        f"double_blocks.{number}." for number in range(json.loads(text)["mm_double_blocks_depth"])
    )
    with safe_open(ROOT / "assets" / "miniature" / WEIGHTS, framework="pt") as file:
        names = [
            name
            for name in file.keys()
            if name.startswith(prefixes) or not name.startswith("double_blocks.")
        ]
        save_file(
            {name: file.get_tensor(name) for name in names},
            root / WEIGHTS,
            metadata=file.metadata(),
        )
    for part in source.iterdir():
        if part.name != "transformer":
            (root / part.name).symlink_to(part.resolve())
    return str(root)
