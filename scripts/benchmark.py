"""Speed compared with what it could be: calls take turns in one process; medians, and the median of pairs' ratios.

    python -m scripts.benchmark transformer                     on a CPU: small width, 2,000 video tokens
    python -m scripts.benchmark transformer --full --compile    on a GPU: 8.3B random weights, 480 x 864, 81 frames
    python -m scripts.benchmark overhead                        an iteration of the miniature beside its model calls
    python -m scripts.benchmark reward                          the miniature's reward model, and an iteration
    python -m scripts.benchmark reward --reward_model videoalign --model_path ckpts    on a GPU: only the clips

transformer: our forward pass beside diffusers' own on the same weights, and beside a matrix product. diffusers gets
what its pipeline gives it: 1,000 + 256 + 729 slots of text, glyphs and vision with masks, of which --valid are used.
Ours gets the valid tokens. FLOP are counted of useful tokens only, so diffusers' rate shows what padding costs.

overhead: an iteration of the trainer beside the same transformer forwards, decode, training forwards with backward and
optimizer step without it. The learning rate is 0, so both compute with the same weights throughout. Files, checkpoints
and validation are part of neither.

reward: clips scored in a batch and one by one, and which part of an iteration waits for scores.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hyvideo.config.command_line import load_config
from hyvideo.data.outside import refusals

MINIATURE = "configs/miniature.yaml"
TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729
FULL = {"num_layers": 54, "num_attention_heads": 16, "attention_head_dim": 128}
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}
CPU = torch.device("cpu")


def take_turns(calls: dict[str, Callable], repeats: int, device: torch.device = CPU) -> dict[str, list[float]]:
    """Seconds of each call, of which one after the other is made; the first of each compiles and warms up."""
    seconds = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios of pairs that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# transformer


class Workload:
    """One sample: latents, a timestep, and the conditions as diffusers and as we take them."""

    def __init__(self, config, grid: tuple[int, int, int], valid: int, device: torch.device, dtype: torch.dtype):
        self.device = device
        make = {"device": device, "dtype": dtype}
        text = torch.randn(1, TEXT_SLOTS, config.text_embed_dim, **make)
        both = {
            "hidden_states": torch.randn(1, config.in_channels, *grid, **make),
            "timestep": torch.tensor([700.0], device=device),
        }
        self.stock = both | {
            "encoder_hidden_states": text,
            "encoder_attention_mask": (torch.arange(TEXT_SLOTS, device=device) < valid)[None].long(),
            "encoder_hidden_states_2": torch.zeros(1, GLYPH_SLOTS, config.text_embed_2_dim, **make),
            "encoder_attention_mask_2": torch.zeros(1, GLYPH_SLOTS, device=device, dtype=torch.long),
            "image_embeds": torch.zeros(1, IMAGE_SLOTS, config.image_embed_dim, **make),
            "return_dict": False,
        }
        self.ours = both | {
            "texts": [text[0, :valid]],
            "glyphs": [torch.zeros(0, config.text_embed_2_dim, **make)],
            "images": [torch.zeros(0, config.image_embed_dim, **make)],
        }
        self.flop = forward_flop(config, grid[0] * grid[1] * grid[2] + valid)

    def forward(self, model: nn.Module, inputs: dict) -> Tensor:
        """The velocity. Shape: (batch, channels, frames, height, width)."""
        is_cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext():
            out = model(**inputs)
        return out[0] if isinstance(out, tuple) else out

    def sample(self, model: nn.Module, inputs: dict) -> Tensor:
        with torch.no_grad():
            return self.forward(model, inputs)

    def train(self, model: nn.Module, inputs: dict) -> None:
        """Forward, recomputation and backward; without the optimizer, which is the same for both."""
        self.forward(model, inputs).float().square().mean().backward()
        model.zero_grad(set_to_none=True)


def forward_flop(config, tokens: int) -> float:
    """FLOP of the blocks: 12 d^2 weights for each token of either stream, and attention over all tokens."""
    dim = config.num_attention_heads * config.attention_head_dim
    weights = (4 + 2 * config.mlp_ratio) * dim**2
    return config.num_layers * (2 * tokens * weights + 4 * tokens**2 * dim)


def peak_memory(call: Callable[[], object], device: torch.device) -> float:
    """GiB that the call needs beyond what lies there before; NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def matrix_rate(dim: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product as large as the largest of a block: (8192, dim) x (dim, 4 dim)."""
    left, right = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((8192, dim), (dim, 4 * dim)))
    seconds = take_turns({"product": lambda: left @ right}, 9, device)["product"]
    return 2 * 8192 * dim * 4 * dim / statistics.median(seconds[3:])


def build_models(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Ours and diffusers' own on the same random weights, both compiled or neither."""
    from diffusers import HunyuanVideo15Transformer3DModel

    from hyvideo.models.transformer import install, stock_twin

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        sizes = (FULL if options.full else SMALL) | ({"num_layers": options.layers} if options.layers else {})
        ours = HunyuanVideo15Transformer3DModel(**sizes).eval()
    torch.set_default_dtype(before)
    models = {"ours": ours} if options.without_stock else {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    if options.compile:
        for name, model in models.items():
            for block in model.transformer_blocks:
                block.compile(fullgraph=name == "ours")
    return models


def benchmark_transformer(options: argparse.Namespace) -> None:
    from hyvideo.models.attention import use_fastest_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    grid = tuple(options.grid or ((21, 30, 54) if options.full else (5, 20, 20)))
    models = build_models(options, device, dtype)
    config = models["ours"].config
    load = Workload(config, grid, options.valid, device, dtype)
    inputs = {"ours": load.ours, "stock": load.stock}
    rate = matrix_rate(config.num_attention_heads * config.attention_head_dim, device, dtype)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {dtype}, attention by {use_fastest_kernels()}, latents {grid}, {options.valid} valid text tokens")
    print(f"matrix product: {rate / 1e12:.3f} TFLOP/s")
    if len(models) == 2:
        ours, stock = (load.sample(model, inputs[name]).float() for name, model in models.items())
        print(f"outputs: largest difference {(ours - stock).abs().max() / stock.abs().max():.1e} of the largest value")
    for stage, run, factor in (("forward", load.sample, 1), ("training", load.train, 4)):
        if options.only not in (None, stage):
            continue
        if stage == "training":
            for model in models.values():
                model.enable_gradient_checkpointing()
        calls = {name: lambda run=run, name=name: run(models[name], inputs[name]) for name in models}
        times = take_turns(calls, options.repeats, device)
        for name, call in calls.items():
            seconds, flop = statistics.median(times[name]), factor * load.flop
            print(
                f"{stage:>9} {name:>6}: {seconds:8.4f} s, {flop / seconds / 1e12:8.3f} TFLOP/s, "
                f"{flop / seconds / rate:6.1%} of the matrix product, peak {peak_memory(call, device):.2f} GiB"
            )
        if len(times) == 2:
            print(f"{stage:>9}  ours / stock: {median_ratio(times['ours'], times['stock']):.3f}")


# overhead and reward


@contextmanager
def cpu_trainer(config_file: str, **settings):
    """A trainer on this CPU whose files are removed."""
    from hyvideo.distributed.mesh import Mesh
    from hyvideo.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "log_video_interval": 0, "valid_video_csv": ""}
        config = load_config(config_file, **settings)
        if config.model.num_threads:
            torch.set_num_threads(config.model.num_threads)
        yield Trainer(config, Mesh(rank=0, world_size=1, sp_size=1), CPU)


def run_iteration(trainer) -> dict[str, float]:
    trainer.iteration += 1
    return trainer.run_iteration()


def bare_calls(trainer, *, with_anchor: bool) -> None:
    """The model calls of one iteration, with nothing around them."""
    config, pipeline, plan = trainer.config, trainer.pipeline, trainer.plan
    batch, part = config.rollout.batch_size, config.loss.mini_batch_size_per_update
    conditions = trainer.encoder([trainer.collector.requests[0]] * batch)
    latents = torch.zeros(batch, *trainer.collector.noise.shape)
    timestep = torch.full((batch,), 500.0)
    passes = plan.num_trained_steps * batch // part
    few = latents[:part], timestep[:part], conditions.select(list(range(part)))
    with torch.no_grad():
        for _ in range(config.rollout.grpo_sampling_steps):
            pipeline.velocity(latents, timestep, conditions)
        pipeline.vae.decode(latents)
        for _ in range(passes if with_anchor else 0):
            pipeline.velocity(*few)
    for _ in range(plan.updates):
        for _ in range(passes // plan.updates):
            pipeline.velocity(*few).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters, 1.0)
        trainer.policy.optimizers.step(config.optimizer.learning_rate)


def benchmark_overhead(options: argparse.Namespace) -> None:
    with cpu_trainer(options.config, learning_rate=0.0) as trainer:
        with_anchor = False

        def iteration() -> None:
            nonlocal with_anchor  # from the second iteration on
            anchor = trainer.policy.anchor
            with_anchor = anchor is not None and not anchor.equals_policy
            run_iteration(trainer)

        calls = {"iteration": iteration, "bare": lambda: bare_calls(trainer, with_anchor=with_anchor)}
        times = take_turns(calls, options.repeats)
    iteration, bare = (statistics.median(seconds) for seconds in times.values())
    print(
        f"iteration {iteration:.3f} s, bare calls {bare:.3f} s, median ratio {median_ratio(*times.values()):.3f} "
        f"over {options.repeats} pairs, {torch.get_num_threads()} threads"
    )


def benchmark_reward(options: argparse.Namespace) -> None:
    from hyvideo.miniature.reward import miniature_trial
    from hyvideo.models.reward_models.rewards import make_scorer
    from hyvideo.models.reward_models.trial_clips import synthetic_trial
    from hyvideo.training.model_setup import choose_device

    is_miniature = options.model_path is None
    device = choose_device("cpu" if is_miniature else "auto")
    scorer = make_scorer(options.reward_model, options.model_path or "assets/miniature", device=device)
    trial, count = miniature_trial() if is_miniature else synthetic_trial(81), options.clips

    def score(number: int) -> list[dict]:
        return scorer.score([trial.video] * number, [trial.prompt] * number, fps=trial.fps)

    calls = {"together": lambda: score(count), "one by one": lambda: [score(1)[0] for _ in range(count)]}
    times = take_turns(calls, options.repeats)  # scores come as numbers, so a GPU is done
    for name, seconds in times.items():
        print(f"{name:>10}: {count / statistics.median(seconds):8.1f} clips/s")
    print(f"together is {median_ratio(times['one by one'], times['together']):.2f} times as fast")
    pairs = zip(calls["together"](), calls["one by one"]())
    print(f"largest difference of a score {max(abs(a[name] - b[name]) for a, b in pairs for name in a):.1e}")
    if is_miniature:
        share_of_waiting(options.config, options.reward_model)


def share_of_waiting(config_file: str, reward_model: str, iterations: int = 5) -> None:
    """Prints which part of an iteration scoring takes, and which part is waited for."""
    # Two batches of rollouts, so that the first is scored while the second is sampled.
    batches = {"batch_size": 16, "gradient_accumulation_steps": 2}
    with cpu_trainer(config_file, reward_model=[reward_model], **batches) as trainer:
        lines = [run_iteration(trainer) for _ in range(iterations)]
    for name, what in (("time/scoring", "scoring, beside other work"), ("time/reward", "waiting for rewards")):
        share = statistics.median(line[name] / line["time/iteration"] for line in lines[1:])
        print(f"{what:>27}: {share:6.1%} of an iteration with {reward_model}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="transformer | overhead | reward")
    transformer, overhead, reward = (commands.add_parser(name) for name in ("transformer", "overhead", "reward"))
    transformer.set_defaults(run=benchmark_transformer)
    transformer.add_argument("--full", action="store_true", help="the 8.3B configuration")
    transformer.add_argument("--layers", type=int, help="another number of blocks")
    transformer.add_argument("--grid", type=int, nargs=3, help="latent frames, height and width")
    transformer.add_argument("--valid", type=int, default=200, help="valid text tokens")
    transformer.add_argument("--compile", action="store_true", help="compile the blocks of both")
    transformer.add_argument("--without_stock", action="store_true", help="leave out diffusers' path")
    transformer.add_argument("--only", choices=["forward", "training"])
    transformer.add_argument("--repeats", type=int, default=7)
    overhead.set_defaults(run=benchmark_overhead)
    overhead.add_argument("--config", default=MINIATURE)
    overhead.add_argument("--repeats", type=int, default=9)
    reward.set_defaults(run=benchmark_reward)
    reward.add_argument("--reward_model", default="videoalign_local")
    reward.add_argument("--model_path", help="checkpoint folder; the miniature's by default")
    reward.add_argument("--config", default=MINIATURE, help="of the iteration")
    reward.add_argument("--clips", type=int, default=16)
    reward.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    with refusals("benchmark.py"):
        options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
