"""Speed of the transformer: random weights drawn where they compute, seconds by the GPU's own events, medians."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from hyvideo.config.memory.cost import Forward, forward_flops
from hyvideo.config.memory.model_sizes import Architecture

TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729


@dataclass(frozen=True)
class Workload:
    """A transformer of random weights, one video for it, and where it computes; the released model's by default."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    sizes: dict = field(default_factory=dict)  # arguments of diffusers' class
    grid: tuple[int, int, int] = (21, 30, 54)  # latent frames, height and width: 81 frames of 480 x 864
    text_tokens: int = 200

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @cached_property
    def architecture(self) -> Architecture:
        return Architecture(**{name: v for name, v in self.sizes.items() if name in Architecture.__dataclass_fields__})

    @property
    def flops(self) -> Forward:
        """FLOP of one forward of one branch."""
        return forward_flops(self.tokens, self.text_tokens, self.architecture)

    def transformer(self) -> nn.Module:
        """diffusers' model, always of the same weights."""
        from diffusers import HunyuanVideo15Transformer3DModel

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                return HunyuanVideo15Transformer3DModel(**self.sizes).eval()
        finally:
            torch.set_default_dtype(before)

    def inputs(self) -> dict[str, dict]:
        """One sample as we take it and as diffusers does: latents, a timestep, and the conditions."""
        sizes, to = self.architecture, {"dtype": self.dtype, "device": self.device}
        randn, zeros = partial(torch.randn, **to), partial(torch.zeros, **to)
        text = randn(1, TEXT_SLOTS, sizes.text_embed_dim)
        latents = randn(1, sizes.in_channels, *self.grid)
        both = {"hidden_states": latents, "timestep": torch.tensor([700.0], device=self.device)}
        ours = {
            "texts": [text[0, : self.text_tokens]],
            "glyphs": [zeros(0, sizes.text_embed_2_dim)],
            "images": [zeros(0, sizes.image_embed_dim)],
        }
        stock = {
            "encoder_hidden_states": text,
            "encoder_attention_mask": (torch.arange(TEXT_SLOTS, device=self.device) < self.text_tokens)[None].long(),
            "encoder_hidden_states_2": zeros(1, GLYPH_SLOTS, sizes.text_embed_2_dim),
            "encoder_attention_mask_2": zeros(1, GLYPH_SLOTS).long(),
            "image_embeds": zeros(1, IMAGE_SLOTS, sizes.image_embed_dim),
            "return_dict": False,
        }
        return {"ours": both | ours, "stock": both | stock}


def forward(model: nn.Module, inputs: dict) -> Tensor:
    """The velocity. Shape: (batch, channels, frames, height, width)."""
    is_mixed = next(model.parameters()).dtype == torch.bfloat16 or model.device.type == "cuda"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_mixed):
        out = model(**inputs)
    return out[0] if isinstance(out, tuple) else out


sample = torch.no_grad()(forward)


def train(model: nn.Module, inputs: dict) -> None:
    """Forward, recomputation and backward; without the optimizer, which is the same for all."""
    forward(model, inputs).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: between two events of its stream on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def take_turns(calls: dict[str, Callable], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call, of which one after the other is made; the first of each compiles and warms up."""
    rounds = [{name: seconds_of(call, device) for name, call in calls.items()} for _ in range(1 + repeats)]
    return {name: [one[name] for one in rounds[1:]] for name in calls}


def median_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median of the seconds of a call that has been made once before."""
    return statistics.median(take_turns({"it": call}, repeats, device)["it"])


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios of pairs that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators))


def product_rates(work: Workload) -> dict[int, float]:
    """FLOP/s of the largest matrix product of a block, by rows: 8,192, and the tokens of the video."""
    width, in_a_row = work.architecture.width, 8 if work.device.type == "cuda" else 1
    rates = {}
    for rows in (8192, work.tokens):
        left, right = (
            torch.randn(*shape, dtype=work.dtype, device=work.device) for shape in ((rows, width), (width, 4 * width))
        )
        call = partial(_products, left, right, in_a_row)
        seconds = take_turns({"products": call}, 9, work.device)["products"]
        rates[rows] = in_a_row * 2 * rows * width * 4 * width / statistics.median(seconds[3:])
    return rates


def _products(left: Tensor, right: Tensor, number: int) -> None:
    for _ in range(number):  # so that a GPU does not wait for the next
        torch.matmul(left, right)


def peak_gib(call: Callable[[], object], device: torch.device) -> float:
    """GiB of a GPU that a call needs beyond what lies there before; 0 elsewhere."""
    if device.type != "cuda":
        call()
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30
