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
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.cost import forward_flops
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.data.outside import Parser, refusals

MINIATURE = "configs/miniature.yaml"
TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}


def take_turns(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, of which one after the other is made; the first of each compiles and warms up."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios of pairs that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators))


# transformer


def make_inputs(config, grid: list[int], valid: int, dtype: torch.dtype) -> dict[str, dict]:
    """One sample as we take it and as diffusers does: latents, a timestep, and the conditions."""
    randn, zeros = partial(torch.randn, dtype=dtype), partial(torch.zeros, dtype=dtype)
    text = randn(1, TEXT_SLOTS, config.text_embed_dim)
    both = {"hidden_states": randn(1, config.in_channels, *grid), "timestep": torch.tensor([700.0])}
    ours = {
        "texts": [text[0, :valid]],
        "glyphs": [zeros(0, config.text_embed_2_dim)],
        "images": [zeros(0, config.image_embed_dim)],
    }
    stock = {
        "encoder_hidden_states": text,
        "encoder_attention_mask": (torch.arange(TEXT_SLOTS) < valid)[None].long(),
        "encoder_hidden_states_2": zeros(1, GLYPH_SLOTS, config.text_embed_2_dim),
        "encoder_attention_mask_2": torch.zeros(1, GLYPH_SLOTS, dtype=torch.long),
        "image_embeds": zeros(1, IMAGE_SLOTS, config.image_embed_dim),
        "return_dict": False,
    }
    return {"ours": both | ours, "stock": both | stock}


def forward(model: nn.Module, inputs: dict) -> Tensor:
    """The velocity. Shape: (batch, channels, frames, height, width)."""
    with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
        out = model(**inputs)
    return out[0] if isinstance(out, tuple) else out


sample = torch.no_grad()(forward)


def train(model: nn.Module, inputs: dict) -> None:
    """Forward, recomputation and backward; without the optimizer, which is the same for both."""
    forward(model, inputs).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def peak_memory(call: Callable[[], object]) -> str:
    """GiB on a GPU that the call needs beyond what lies there before."""
    if not torch.cuda.is_available():
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return f", peak {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


def build_models(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Ours and diffusers' own on the same random weights, both compiled or neither."""
    from diffusers import HunyuanVideo15Transformer3DModel

    from hyvideo.models.transformer import install, stock_twin

    torch.manual_seed(0)
    sizes = ({} if options.full else SMALL) | ({"num_layers": options.layers} if options.layers else {})
    ours = HunyuanVideo15Transformer3DModel(**sizes).type(dtype).eval()
    models = {"ours": ours} if options.without_stock else {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    if options.compile:
        for name, model in models.items():
            for block in model.transformer_blocks:
                block.compile(fullgraph=name == "ours")
    return models


def benchmark_transformer(options: argparse.Namespace) -> None:
    from hyvideo.models.attention_kernels import use_fastest_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    grid = tuple(options.grid or ((21, 30, 54) if options.full else (5, 20, 20)))
    with device:
        models = build_models(options, dtype)
        config = models["ours"].config
        inputs = make_inputs(config, grid, options.valid, dtype)
        layers, heads, head_dim = config.num_layers, config.num_attention_heads, config.attention_head_dim
        sizes = Architecture(num_layers=layers, num_attention_heads=heads, attention_head_dim=head_dim)
        width = sizes.width
        left, right = (torch.randn(*shape, dtype=dtype) for shape in ((8192, width), (width, 4 * width)))
    flop = forward_flops(math.prod(grid), options.valid, sizes).total
    seconds = take_turns({"product": lambda: left @ right}, 9)["product"]
    rate = 2 * 8192 * width * 4 * width / statistics.median(seconds[3:])  # as large as the largest of a block
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {dtype}, attention by {use_fastest_kernels()}, latents {grid}, {options.valid} valid text tokens")
    print(f"matrix product: {rate / 1e12:.3f} TFLOP/s")
    if len(models) == 2:
        ours, stock = (sample(model, inputs[name]).float() for name, model in models.items())
        print(f"outputs: largest difference {(ours - stock).abs().max() / stock.abs().max():.1e} of the largest value")
    for stage, run, factor in (("forward", sample, 1), ("training", train, 4)):
        if options.only not in (None, stage):
            continue
        if stage == "training":
            for model in models.values():
                model.enable_gradient_checkpointing()
        calls = {name: lambda run=run, name=name: run(models[name], inputs[name]) for name in models}
        times = take_turns(calls, options.repeats)
        for name, call in calls.items():
            speed = factor * flop / statistics.median(times[name])
            print(
                f"{stage:>9} {name:>6}: {statistics.median(times[name]):8.4f} s, {speed / 1e12:8.3f} TFLOP/s, "
                f"{speed / rate:6.1%} of the matrix product{peak_memory(call)}"
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
        yield Trainer(config, Mesh(rank=0, world_size=1, sp_size=1), torch.device("cpu"))


def run_iteration(trainer) -> dict[str, float]:
    trainer.iteration += 1
    return trainer.run_iteration()


def bare_calls(trainer) -> None:
    """The model calls of the next iteration, with nothing around them."""
    config, pipeline, plan, anchor = trainer.config, trainer.pipeline, trainer.plan, trainer.policy.anchor
    with_anchor = anchor is not None and not anchor.equals_policy
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
        calls = {"bare": lambda: bare_calls(trainer), "iteration": lambda: run_iteration(trainer)}
        times = take_turns(calls, options.repeats)
    bare, iteration = (statistics.median(seconds) for seconds in times.values())
    ratio = median_ratio(times["iteration"], times["bare"])
    print(
        f"iteration {iteration:.3f} s, bare calls {bare:.3f} s, median ratio {ratio:.3f} "
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
    if not is_miniature:
        return
    # Two batches of rollouts, so that the first is scored while the second is sampled.
    batches = {"batch_size": 16, "gradient_accumulation_steps": 2}
    with cpu_trainer(options.config, reward_model=[options.reward_model], **batches) as trainer:
        lines = [run_iteration(trainer) for _ in range(5)]
    for name, what in (("time/scoring", "scoring, beside other work"), ("time/reward", "waiting for rewards")):
        share = statistics.median(line[name] / line["time/iteration"] for line in lines[1:])
        print(f"{what:>27}: {share:6.1%} of an iteration with {options.reward_model}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
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
    reward.add_argument("--reward_model", default="miniature_videoalign")
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
