"""How fast the transformer runs here, beside diffusers' stock path in the same run, and beside a matrix product.

    python -m scripts.benchmark_transformer                       on a CPU: small width, 2,000 video tokens
    python -m scripts.benchmark_transformer --full --compile      on a GPU: 8.3B random weights, 480 x 864, 81 frames

The stock path gets what its pipeline gives it: 1,000 + 256 + 729 slots of text, glyphs and vision with masks, of which
``--valid`` are used. Ours gets the valid tokens. Runs are interleaved; medians and the median of the pairs' ratios are
shown. FLOP are counted of useful tokens only (valid text), so the stock path's rate shows what padding and masks cost.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from hyvideo.models.attention import use_fastest_kernels
from hyvideo.models.transformer import install

TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729
FULL = {"num_layers": 54, "num_attention_heads": 16, "attention_head_dim": 128}
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}


class Workload:
    """One sample: latents, a timestep, and the conditions in both forms."""

    def __init__(self, model: nn.Module, grid: tuple[int, int, int], valid: int, dtype: torch.dtype):
        self.device = next(model.parameters()).device
        make = {"device": self.device, "dtype": dtype}
        config = model.config
        latents = torch.randn(1, config.in_channels, *grid, **make)
        text = torch.randn(1, TEXT_SLOTS, config.text_embed_dim, **make)
        timestep = torch.tensor([700.0], device=self.device)
        mask = (torch.arange(TEXT_SLOTS, device=self.device) < valid)[None].long()
        none = torch.zeros(1, GLYPH_SLOTS, device=self.device, dtype=torch.long)
        self.stock = {
            "hidden_states": latents,
            "timestep": timestep,
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": torch.zeros(1, GLYPH_SLOTS, config.text_embed_2_dim, **make),
            "encoder_attention_mask_2": none,
            "image_embeds": torch.zeros(1, IMAGE_SLOTS, config.image_embed_dim, **make),
            "return_dict": False,
        }
        self.ours = {
            "hidden_states": latents,
            "timestep": timestep,
            "texts": [text[0, :valid]],
            "glyphs": [torch.zeros(0, config.text_embed_2_dim, **make)],
            "images": [torch.zeros(0, config.image_embed_dim, **make)],
        }
        frames, height, width = grid
        self.flop = forward_flop(config, frames * height * width, valid)

    def autocast(self):
        is_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext()


def forward_flop(config, image_tokens: int, text_tokens: int) -> float:
    """Of the blocks: 12 d^2 weights for each token of either stream, and attention over all tokens."""
    dim = config.num_attention_heads * config.attention_head_dim
    tokens = image_tokens + text_tokens
    weights = (4 + 2 * config.mlp_ratio) * dim**2
    return config.num_layers * (2 * tokens * weights + 4 * tokens**2 * dim)


def forward(model: nn.Module, inputs: dict, load: Workload) -> None:
    with torch.no_grad(), load.autocast():
        model(**inputs)


def training_step(model: nn.Module, inputs: dict, load: Workload) -> None:
    """Forward, recomputation and backward; without the optimizer, which is the same for both."""
    with load.autocast():
        out = model(**inputs)
    (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def timed(call: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory(call: Callable[[], None], device: torch.device) -> float:
    """GiB that the call needed beyond what lay there before; NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def matrix_rate(dim: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product as large as the largest of a block: (8192, dim) x (dim, 4 dim)."""
    left, right = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((8192, dim), (dim, 4 * dim)))
    times = [timed(lambda: left @ right, device) for _ in range(20)]
    return 2 * 8192 * dim * 4 * dim / statistics.median(times[5:])


def compare(name: str, calls: dict[str, Callable[[], None]], flop: float, rate: float, repeats: int, device) -> None:
    """Prints a line for each call, and the ratio of the two."""
    for call in calls.values():
        call()  # compiles, warms up
    times = {label: [] for label in calls}
    for _ in range(repeats):
        for label, call in calls.items():
            times[label].append(timed(call, device))
    for label, call in calls.items():
        seconds = statistics.median(times[label])
        memory = peak_memory(call, device)
        print(
            f"{name:>9} {label:>6}: {seconds:8.4f} s, {flop / seconds / 1e12:8.3f} TFLOP/s, "
            f"{flop / seconds / rate:6.1%} of the matrix product, peak {memory:.2f} GiB"
        )
    if len(times) == 2:
        ratio = statistics.median(a / b for a, b in zip(times["ours"], times["stock"]))
        print(f"{name:>9}  ours / stock: {ratio:.3f}")


def build(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        sizes = (FULL if options.full else SMALL) | ({"num_layers": options.layers} if options.layers else {})
        model = HunyuanVideo15Transformer3DModel(**sizes)
        torch.set_default_dtype(before)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the 8.3B configuration")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    parser.add_argument("--grid", type=int, nargs=3, help="latent frames, height and width")
    parser.add_argument("--valid", type=int, default=200, help="valid text tokens")
    parser.add_argument("--compile", action="store_true", help="compile our blocks")
    parser.add_argument("--without_stock", action="store_true", help="leave out diffusers' path")
    parser.add_argument("--only", choices=["forward", "training"])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    grid = tuple(options.grid or ((21, 30, 54) if options.full else (5, 20, 20)))
    stock = build(options, device, dtype)
    ours = stock
    if not options.without_stock:
        # One set of weights: the copy has modules of its own and shares every tensor.
        ours = copy.deepcopy(stock, {id(tensor): tensor for tensor in (*stock.parameters(), *stock.buffers())})
    install(ours)
    if options.compile:
        for block in ours.transformer_blocks:
            block.compile(fullgraph=True)
    load = Workload(stock, grid, options.valid, dtype)
    dim = stock.config.num_attention_heads * stock.config.attention_head_dim
    rate = matrix_rate(dim, device, dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {dtype}, attention by {use_fastest_kernels()}, latents {grid}, {options.valid} valid text tokens")
    print(f"matrix product: {rate / 1e12:.3f} TFLOP/s")
    for name, run, factor in (("forward", forward, 1), ("training", training_step, 4)):
        if options.only in (None, name):
            models = {"ours": (ours, load.ours)}
            if not options.without_stock:
                models["stock"] = (stock, load.stock)
            if name == "training":
                for model, _ in models.values():
                    model.enable_gradient_checkpointing()
            calls = {
                label: (lambda model=model, inputs=inputs, run=run: run(model, inputs, load))
                for label, (model, inputs) in models.items()
            }
            compare(name, calls, factor * load.flop, rate, options.repeats, device)


if __name__ == "__main__":
    main()
