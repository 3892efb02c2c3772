"""Speed of the transformer with random weights, and the difference between two results.

Times on a GPU are measured with CUDA events.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from hyvideo.models.conditions import Condition
from hyvideo.models.family import Family, families
from hyvideo.models.sizes import Sizes, read_sizes
from hyvideo.planning.flops import Flops, flops_of_latents
from tests.stock_models import stock_inputs


@dataclass(frozen=True)
class Workload:
    """A transformer with random weights, the size of one video, and a device; the released model by
    default.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    sizes: dict = field(default_factory=dict)  # arguments of diffusers' class
    # latent frames, height and width: 81 frames of 352 x 624
    grid: tuple[int, int, int] = (21, 22, 39)
    text_tokens: int = 300
    family: Family = field(default_factory=lambda: families()[0])

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @cached_property
    def architecture(self) -> Sizes:
        class_name = self.family.transformer.class_name
        return read_sizes(self.family.name, {"_class_name": class_name} | self.sizes, {})

    @property
    def flops(self) -> Flops:
        """FLOP of one forward pass of one branch."""
        return flops_of_latents(self.architecture, self.grid, self.text_tokens)

    def speed(self, seconds: float, rate: float, *, forwards: float = 1.0) -> dict[str, float]:
        """Return the speed of ``forwards`` forward passes in ``seconds``, and its share of ``rate``
        FLOP/s.
        """
        reached = forwards * self.flops.total / seconds
        return {"TFLOP/s": reached / 1e12, "share of the product": reached / rate}

    def transformer(self) -> nn.Module:
        """Return diffusers' model with random weights, always the same."""
        import diffusers

        torch.manual_seed(0)
        with self.device:
            model = getattr(diffusers, self.family.transformer.class_name)(**self.sizes)
        return model.to(self.dtype).eval()

    def inputs(self, transformer: nn.Module) -> dict[str, dict]:
        """Return the arguments of our forward pass and of diffusers' ("stock") for the same
        sample.
        """
        randn = partial(torch.randn, dtype=self.dtype, device=self.device)
        ours = {
            "latents": randn(1, self.architecture.out_channels, *self.grid),
            "timestep": torch.tensor([700.0], device=self.device),
            "conditions": [Condition(randn(self.text_tokens, self.architecture.text_width))],
        }
        return {"ours": ours, "stock": stock_inputs(transformer, **ours)}


def forward(model: nn.Module, inputs: dict) -> Tensor:
    """Return the velocity. Shape: (batch, channels, frames, height, width)."""
    is_mixed = next(model.parameters()).dtype == torch.bfloat16 or model.device.type == "cuda"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_mixed):
        if cache := getattr(model, "modulation_cache", None):  # diffusers' model has none
            cache.select([(time, None) for time in inputs["timestep"].tolist()])
        out = model(**inputs)
    return out[0] if isinstance(out, tuple) else out


sample = torch.no_grad()(forward)


def train(model: nn.Module, inputs: dict) -> Tensor:
    """Run a forward and backward pass without the optimizer; return the gradient of the first
    parameter.
    """
    forward(model, inputs).float().square().mean().backward()
    gradient = next(model.parameters()).grad
    model.zero_grad(set_to_none=True)
    return gradient


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: between two CUDA events on a GPU, else CPU seconds."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def take_turns(
    calls: dict[str, Callable], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of each call, run in turns ``repeats`` times after a first turn that
    compiles and warms up.
    """
    turns = [
        {name: seconds_of(call, device) for name, call in calls.items()} for _ in range(1 + repeats)
    ]
    return {name: [turn[name] for turn in turns[1:]] for name in calls}


def product_rates(work: Workload) -> dict[int, float]:
    """Return the FLOP/s of the largest matrix product of a block, for 8,192 rows and for the tokens
    of the video.
    """
    width, to = work.architecture.width, {"dtype": work.dtype, "device": work.device}
    right = torch.randn(width, 4 * width, **to)
    several = range(8 if work.device.type == "cuda" else 1)  # keeps a GPU busy
    rates = {}
    for rows in (8192, work.tokens):
        left = torch.randn(rows, width, **to)
        calls = {"products": lambda left=left: [left @ right for _ in several]}
        seconds = take_turns(calls, 9, work.device)["products"]
        rates[rows] = len(several) * 2 * rows * width * 4 * width / statistics.median(seconds[3:])
    return rates


def peak_gib(call: Callable[[], object], device: torch.device) -> float:
    """Return the peak GPU memory in GiB that a call needs beyond what is allocated before it; 0
    without a GPU.
    """
    if device.type != "cuda":
        call()
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference divided by the largest absolute value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
