"""Copies of the miniatures with two of their four transformer blocks, for runs whose length does
not matter.

The folder `SHALLOW` has a configuration without weights, for runs with random weights.
"""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file  # the configuration of pytest needs no torch

SHALLOW = "tests/shallow_miniature"
ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "diffusion_pytorch_model.safetensors"
NUM_BLOCKS = 2
LAYOUTS = {  # setting with the number of blocks: prefix of the tensors of blocks
    "mm_double_blocks_depth": "double_blocks.",
    "num_layers": "blocks.",
}


def write_trained(root: Path, source: str = "assets/miniature") -> str:
    """Write the first blocks of a miniature with their weights to ``root``, and return it."""
    root.mkdir(parents=True)
    for part in (ROOT / source).iterdir():
        if part.name.startswith("transformer"):
            for weights in part.resolve().rglob(WEIGHTS):
                folder = root / part.name / weights.parent.relative_to(part.resolve())
                _write_transformer(weights.parent, folder)
        else:
            (root / part.name).symlink_to(part.resolve())
    return str(root)


def _write_transformer(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (depth,) = LAYOUTS.keys() & config.keys()
    (folder / "config.json").write_text(json.dumps(config | {depth: NUM_BLOCKS}))
    left_out = tuple(f"{LAYOUTS[depth]}{number}." for number in range(NUM_BLOCKS, config[depth]))
    with safe_open(source / WEIGHTS, framework="numpy") as file:
        names = [name for name in file.keys() if not name.startswith(left_out)]
        tensors = {name: file.get_tensor(name) for name in names}
        save_file(tensors, folder / WEIGHTS, metadata=file.metadata())
