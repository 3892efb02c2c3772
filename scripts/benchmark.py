"""Compare the speed of the transformers with diffusers' classes, on the same random weights.

    python -m scripts.benchmark
    python -m scripts.benchmark --versions wan2.1_t2v_1.3b --size 33 240 416 --num_layers 1 --num_pairs 3

For each version, it runs the forward pass without gradient, and the forward and backward pass with
gradients of all weights. Ours and diffusers' take turns in one process, in the other order in each
second pair. A row has the median seconds, the median over the pairs of diffusers' seconds divided by
ours, with its range, and the largest difference of the outputs (or of a gradient) relative to the
largest value. Seconds are those of CUDA events on a GPU, and CPU seconds of the process on a CPU.

Only the transformer is compared: one video, text to video, a text of --text_tokens tokens, the blocks
of released width but only --num_layers of them, no recomputation and no compilation. diffusers gets
the padded text, with masks if its class has them, as from its pipeline. In bf16, ours computes under
autocast as in a run; diffusers' does so only with gradients, as in training scripts.
docs/coming_from_other_code.md#which-program-for-what compares whole iterations with other programs.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.text import align_columns
from hyvideo.models.family import family_named, install
from hyvideo.models.sizes import released_sizes
from hyvideo.models.versions import RELEASED, UNSUPPORTED
from tests.cuda.speed import Workload, relative_difference, seconds_of
from tests.stock_models import stock_twin

VERSIONS = [
    name
    for name, version in RELEASED.items()
    if version.task in ("t2v", "ti2v")
    and version.boundary is None  # its two transformers are those of wan2.1_t2v_14b
    and not version.is_flow_map
    and name not in UNSUPPORTED
]


class Comparison(NamedTuple):
    """Seconds of calls that took turns, and how much their results differ."""

    ours: list[float]
    diffusers: list[float]
    difference: float

    def row(self) -> tuple[str, ...]:
        ratios = [theirs / ours for theirs, ours in zip(self.diffusers, self.ours)]
        return (
            f"{statistics.median(self.diffusers):.3g}",
            f"{statistics.median(self.ours):.3g}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{self.difference:.1e}",
        )


def compare(work: Workload, num_pairs: int) -> dict[str, Comparison]:
    """Return the comparisons of a forward pass and of a pass with gradient."""
    ours = work.transformer()
    models = {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    inputs = work.inputs(ours)
    is_bf16 = work.dtype == torch.bfloat16
    forward = {
        name: partial(velocity, model, inputs[name], autocast=is_bf16 and name == "ours")
        for name, model in models.items()
    }
    training = {
        name: partial(gradient, model, inputs[name], autocast=is_bf16)
        for name, model in models.items()
    }
    return {
        "forward": take_turns(forward, num_pairs, work.device),
        "with gradient": take_turns(training, num_pairs, work.device),
    }


def take_turns(
    calls: dict[str, Callable[[], Tensor]], num_pairs: int, device: torch.device
) -> Comparison:
    """Return the comparison of the calls "ours" and "stock", after one call of each."""
    results = {name: call() for name, call in calls.items()}
    difference = relative_difference(results["ours"].float(), results["stock"].float())
    del results
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for pair in range(num_pairs):
        for name in list(calls) if pair % 2 == 0 else reversed(list(calls)):
            seconds[name].append(seconds_of(calls[name], device))
    return Comparison(seconds["ours"], seconds["stock"], difference)


@torch.no_grad()
def velocity(model: nn.Module, inputs: dict, *, autocast: bool) -> Tensor:
    """Return the velocity of a forward pass. Shape: (1, channels, frames, height, width)."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        output = model(**inputs)
    return output[0] if isinstance(output, tuple) else output


def gradient(model: nn.Module, inputs: dict, *, autocast: bool) -> Tensor:
    """Return the gradient of the first parameter after a forward and backward pass."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        output = model(**inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().mean().backward()
    found = next(model.parameters()).grad
    model.zero_grad(set_to_none=True)
    return found


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--versions",
        nargs="+",
        choices=VERSIONS,
        metavar="VERSION",
        default=["wan2.1_t2v_1.3b", "480p_t2v"],
        help="versions to compare: " + ", ".join(VERSIONS),
    )
    parser.add_argument(
        "--size",
        nargs=3,
        type=int,
        default=[9, 160, 256],
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="size of the video",
    )
    parser.add_argument("--num_layers", type=int, default=2, help="number of blocks")
    parser.add_argument("--text_tokens", type=int, default=40, help="tokens of the text")
    parser.add_argument("--num_pairs", type=int, default=5, help="calls of each model")
    parser.add_argument("--num_threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device",
    )
    return parser.parse_args(argv)


@exit_on_error("benchmark.py")
def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    torch.set_num_threads(options.num_threads)
    device = torch.device(options.device)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rows = [("version", "tokens", "pass", "diffusers, s", "ours, s", "ratio", "difference")]
    for version in options.versions:
        sizes = released_sizes(version)
        work = Workload(
            device,
            dtype,
            sizes={name: value for name, value in sizes.transformer.items() if name[0] != "_"}
            | {"num_layers": options.num_layers},
            grid=sizes.latent_size(*options.size),
            text_tokens=options.text_tokens,
            family=family_named(sizes.family),
        )
        tokens = f"{sizes.image_tokens(*options.size):,}"
        print(f"{version}: {tokens} tokens, num_layers {options.num_layers}", flush=True)
        for name, comparison in compare(work, options.num_pairs).items():
            rows.append((version, tokens, name, *comparison.row()))
    print("\n".join(align_columns(rows)))


if __name__ == "__main__":
    main()
