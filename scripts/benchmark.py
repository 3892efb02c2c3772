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
import json
import statistics
import sys
import tempfile
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from hyvideo.config.command_line import load_config
from hyvideo.data.outside import Parser, refusals
from hyvideo.evaluation.parity import relative_difference
from hyvideo.evaluation.speed import Workload, median_ratio, peak_gib, product_rates, sample, take_turns, train

MINIATURE = "configs/miniature.yaml"
CPU = torch.device("cpu")
Report = tuple[list[str], dict]  # lines to read, and the same numbers by name
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}


def benchmark_transformer(options: argparse.Namespace) -> Report:
    from hyvideo.models.attention_kernels import use_fastest_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = ({} if options.full else SMALL) | ({"num_layers": options.layers} if options.layers else {})
    grid = tuple(options.grid or (Workload.grid if options.full else (5, 20, 20)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    work = Workload(device, dtype, sizes, grid, options.valid)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    kernels, models, inputs = use_fastest_kernels(), build_models(work, options), work.inputs()
    rates = product_rates(work)
    lines = [f"{where}, {dtype}, attention by {kernels}, latents {grid}, {options.valid} valid text tokens"]
    lines += [f"matrix product of {rows:,} rows: {rate / 1e12:.3f} TFLOP/s" for rows, rate in rates.items()]
    numbers = {"where": where, "dtype": str(dtype), "kernels": kernels, "grid": grid, "product": rates}
    if len(models) == 2:
        ours, stock = (sample(model, inputs[name]).float() for name, model in models.items())
        numbers["difference"] = relative_difference(ours, stock)
        lines.append(f"outputs: largest difference {numbers['difference']:.1e} of the largest value")
    for stage, run, factor in (("forward", sample, 1), ("training", train, 4)):
        if options.only not in (None, stage):
            continue
        if stage == "training":
            for model in models.values():
                model.enable_gradient_checkpointing()
        calls = {name: partial(run, models[name], inputs[name]) for name in models}
        times = take_turns(calls, options.repeats, device)
        for name, call in calls.items():
            seconds, peak = statistics.median(times[name]), peak_gib(call, device)
            speed = factor * work.flops.total / seconds
            numbers[f"{stage} {name}"] = {"seconds": seconds, "flops": speed, "peak_gib": peak}
            lines.append(
                f"{stage:>9} {name:>6}: {seconds:8.4f} s, {speed / 1e12:8.3f} TFLOP/s, "
                f"{speed / max(rates.values()):6.1%} of the matrix product{f', peak {peak:.2f} GiB' if peak else ''}"
            )
        if len(times) == 2:
            numbers[f"{stage} ratio"] = median_ratio(times["ours"], times["stock"])
            lines.append(f"{stage:>9}  ours / stock: {numbers[f'{stage} ratio']:.3f}")
    return lines, numbers


def build_models(work: Workload, options: argparse.Namespace) -> dict[str, nn.Module]:
    """Ours and diffusers' own on the same random weights, both compiled or neither."""
    from hyvideo.distributed.mesh import Mesh
    from hyvideo.distributed.parallelize import Parallelism, parallelize
    from hyvideo.models.transformer import install, stock_twin

    ours = work.transformer()
    models = {"ours": ours} if options.without_stock else {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    parallelize(ours, Mesh(rank=0, world_size=1, sp_size=1), Parallelism(compile=options.compile))
    if options.compile and "stock" in models:
        for block in models["stock"].transformer_blocks:
            block.compile()
    return models


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


def bare_calls(trainer) -> None:
    """The model calls of the next iteration, with nothing around them."""
    config, pipeline, plan, anchor = trainer.config, trainer.pipeline, trainer.plan, trainer.policy.anchor
    with_anchor = anchor is not None and not anchor.equals_policy
    batch, part = config.rollout.batch_size, config.rows_per_pass
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


def benchmark_overhead(options: argparse.Namespace) -> Report:
    with cpu_trainer(options.config, learning_rate=0.0) as trainer:
        calls = {"bare": lambda: bare_calls(trainer), "iteration": lambda: run_iteration(trainer)}
        times = take_turns(calls, options.repeats, CPU)
    numbers = {name: statistics.median(seconds) for name, seconds in times.items()}
    numbers["ratio"] = median_ratio(times["iteration"], times["bare"])
    line = (
        f"iteration {numbers['iteration']:.3f} s, bare calls {numbers['bare']:.3f} s, median ratio "
        f"{numbers['ratio']:.3f} over {options.repeats} pairs, {torch.get_num_threads()} threads"
    )
    return [line], numbers


def benchmark_reward(options: argparse.Namespace) -> Report:
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
    times = take_turns(calls, options.repeats, device)
    numbers = {f"{name}, clips/s": count / statistics.median(seconds) for name, seconds in times.items()}
    lines = [f"{name:>20}: {speed:8.1f}" for name, speed in numbers.items()]
    numbers["ratio"] = median_ratio(times["one by one"], times["together"])
    pairs = zip(calls["together"](), calls["one by one"]())
    numbers["difference"] = max(abs(a[name] - b[name]) for a, b in pairs for name in a)
    lines.append(f"together is {numbers['ratio']:.2f} times as fast")
    lines.append(f"largest difference of a score {numbers['difference']:.1e}")
    if not is_miniature:
        return lines, numbers
    # Two batches of rollouts, so that the first is scored while the second is sampled.
    batches = {"batch_size": 16, "gradient_accumulation_steps": 2}
    with cpu_trainer(options.config, reward_model=[options.reward_model], **batches) as trainer:
        iterations = [run_iteration(trainer) for _ in range(5)]
    for name, what in (("time/scoring", "scoring, beside other work"), ("time/reward", "waiting for rewards")):
        numbers[name] = statistics.median(line[name] / line["time/iteration"] for line in iterations[1:])
        lines.append(f"{what:>27}: {numbers[name]:6.1%} of an iteration with {options.reward_model}")
    return lines, numbers


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
    for command in (transformer, overhead, reward):
        command.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    options = parser.parse_args(argv)
    with refusals("benchmark.py"):
        lines, numbers = options.run(options)
    print(json.dumps(numbers) if options.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
