"""Run a program of the project with cheap replacements of the two operations that take hours on a
CPU.

    python hyvideo/rehearsal/stand_ins.py [--real_decoder] post_train.py [flags]

Attention over many tokens becomes a mean over tokens, and the decoder an enlargement of three
latent channels. Both keep the shapes, the dtypes and the gradients; everything around them is real.
Commands that the program starts, as scripts.improve does, have the same replacements.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hyvideo.files import steps
from hyvideo.models import attention, attention_kernels, decoding
from hyvideo.models.family import family_of

REAL_TOKENS = 1024  # attention over at most as many tokens is real


def mean_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return real attention for few tokens, else a cheap mix that depends on all inputs.

    Shape of each: (batch, heads, tokens, head dim).
    """
    if query.shape[-2] <= REAL_TOKENS:
        return attention_kernels.scaled_dot_product(query, key, value)
    over_tokens = value.mean(dim=-2, keepdim=True) + 0.1 * key.mean(dim=-2, keepdim=True)
    return 0.1 * query + over_tokens


def enlarged(vae: nn.Module, latents: Tensor, tiles: object = None) -> Tensor:
    """Return the first three latent channels, enlarged to the size of the decoded video.

    Shapes: (batch, channels, frames, height, width).
    """
    latents_of_vae = family_of(vae).latents(vae.config)
    frames, height, width = latents.shape[2:]
    size = (
        (frames - 1) * latents_of_vae.temporal + 1,
        height * latents_of_vae.spatial,
        width * latents_of_vae.spatial,
    )
    colors = latents[:, :3].float().clamp(-1, 1)
    return F.interpolate(colors, size, mode="trilinear").to(latents.dtype)


def enlarged_with_gradient(vae: nn.Module, latents: Tensor, *, recompute: bool) -> Tensor:
    """Return `enlarged`, for passes with a reward gradient."""
    return enlarged(vae, latents)


def run_with_stand_ins(command: Sequence[object]) -> int:
    """Run a Python command of a program of several steps with the replacements, and return its exit
    code.
    """
    python, *program = command
    return _run_step([python, __file__, *program])


_run_step = steps.run


def main() -> None:
    words = sys.argv[1:]
    has_real_decoder = words[0] == "--real_decoder"
    program = words[1:] if has_real_decoder else words
    attention.scaled_dot_product = mean_attention
    if not has_real_decoder:
        decoding.decode = enlarged
        decoding.decode_with_gradient = enlarged_with_gradient
    steps.run = run_with_stand_ins
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
