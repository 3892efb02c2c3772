"""Run a program and write, as JSON, how many blocks each forward pass of HunyuanVideo-1.5's
transformer ran.

hyvideo/planning/rehearsal/stand_ins.py tests/true_sizes/counted_blocks.py FILE.json generate.py
[flags]
"""

import json
import runpy
import sys
from pathlib import Path

from hyvideo.models.hunyuan_video15 import transformer


def count() -> list[list[float]]:
    """Return a list to which every forward pass adds [timestep of its first sample, blocks that
    ran].
    """
    passes: list[list[float]] = []
    forward = transformer.forward
    block_forward = transformer.block_forward

    def counted_forward(self, latents, timestep, *inputs, **options):
        passes.append([timestep[0].item(), 0])
        return forward(self, latents, timestep, *inputs, **options)

    def counted_block(*inputs, **options):
        passes[-1][1] += 1
        return block_forward(*inputs, **options)

    transformer.forward = counted_forward
    transformer.block_forward = counted_block
    return passes


def main() -> None:
    file = Path(sys.argv[1])
    passes = count()
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        file.write_text(json.dumps(passes))


if __name__ == "__main__":
    main()
