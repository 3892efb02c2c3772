"""Run a program with real attention over any number of tokens, and save the latents that the first
rank decodes.

hyvideo/rehearsal/stand_ins.py [--real_decoder] tests/true_sizes/saved_latents.py FILE.pt
generate.py [flags]
"""

import runpy
import sys
from pathlib import Path

import torch

from hyvideo.models import attention, attention_kernels, decoding
from hyvideo.settings import processes


def save_latents(file: Path) -> None:
    """Save the latents of every later decoding in ``file``, which then has those of the
    last one.
    """
    decode = decoding.decode

    def saving_decode(vae, latents, tiles=None):
        if processes.rank() == 0:
            torch.save(latents, file)
        return decode(vae, latents, tiles)

    decoding.decode = saving_decode


def main() -> None:
    attention.scaled_dot_product = attention_kernels.scaled_dot_product
    save_latents(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
