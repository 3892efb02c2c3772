"""Benchmarks: the transformer against diffusers, an iteration against its model calls, and the reward model.

    python -m scripts.benchmark transformer                     on a CPU: small width, 2,000 video tokens
    python -m scripts.benchmark transformer --full --compile    on a GPU: 8.3B random weights, 480 x 864, 81 frames
    python -m scripts.benchmark overhead                        an iteration of the miniature against its model calls
    python -m scripts.benchmark reward                          the miniature's reward model, and an iteration
    python -m scripts.benchmark reward --reward_model videoalign --model_path ckpts    on a GPU: scoring only

Calls alternate in one process; the output has medians and the median ratio of consecutive pairs.

transformer: our forward pass, diffusers' on the same weights, and a matrix product. diffusers gets padded conditions
with masks, as from its pipeline, of which --valid text tokens are used; ours gets only those. Velocities, or a gradient
of a training step, are compared first. FLOP count valid tokens only, so diffusers' rate includes the cost of padding.

overhead: an iteration of the trainer against the same forward passes, decoding, backward passes and optimizer step in a
bare loop. The learning rate is 0, so both use the same weights. Files, checkpoints and validation are not included.

reward: videos scored in a batch and one by one, and the share of an iteration spent waiting for scores.

Prints one number per line, or one JSON object with --json.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from hyvideo.config.command_line import load_config
from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.evaluation.speed import Workload, peak_gib, product_rates, relative_difference, sample, take_turns, train
from hyvideo.miniature.reward import miniature_trial
from hyvideo.models.attention_kernels import Shape, choose_kernel
from hyvideo.models.family import blocks, install, stock_twin
from hyvideo.models.reward_models.rewards import make_scorer
from hyvideo.models.reward_models.trial_clips import synthetic_trial
from hyvideo.trainer import Trainer
from hyvideo.training.model_setup import choose_device

MINIATURE = "configs/miniature.yaml"
CPU, ALONE = torch.device("cpu"), Mesh(rank=0, world_size=1, sp_size=1)
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64, "rope_axes_dim": (16, 24, 24)}


def compare(calls: dict[str, Callable], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each call and, for two calls, the median ratio of consecutive pairs."""
    times = take_turns(calls, repeats, device)
    numbers = {f"{name}, s": statistics.median(seconds) for name, seconds in times.items()}
    if len(times) == 2:
        numbers[" / ".join(times)] = statistics.median(a / b for a, b in zip(*times.values()))
    return numbers


def benchmark_transformer(options: argparse.Namespace) -> dict:
    device = choose_device("auto")
    sizes = ({} if options.full else SMALL) | ({"num_layers": options.layers} if options.layers else {})
    grid = tuple(options.grid or (Workload.grid if options.full else (5, 20, 20)))
    work = Workload(device, torch.bfloat16 if device.type == "cuda" else torch.float32, sizes, grid, options.valid)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    numbers = {"on": where, "dtype": str(work.dtype), "attention by": choose_kernel("auto", Shape(), device).kernel}
    models, rates = build_models(work, options), product_rates(work)
    inputs = work.inputs(models["ours"])
    numbers |= {"latents": grid, "valid text tokens": options.valid}
    numbers |= {f"matrix product of {rows:,} rows, TFLOP/s": rate / 1e12 for rows, rate in rates.items()}
    for stage, run, forwards in (("forward", sample, 1), ("training", train, 4)):
        if options.only not in (None, stage):
            continue
        if stage == "training":
            for model in models.values():
                model.enable_gradient_checkpointing()
        calls = {f"{stage} {name}": partial(run, model, inputs[name]) for name, model in models.items()}
        if len(calls) == 2:
            results = [call().float() for call in calls.values()]
            numbers[f"{stage}, largest difference"] = relative_difference(*results)
        numbers |= compare(calls, options.repeats, device)
        for name, call in calls.items():
            speeds = work.speed(numbers[f"{name}, s"], max(rates.values()), forwards=forwards)
            numbers |= {f"{name}, {what}": value for what, value in speeds.items()}
            numbers[f"{name}, peak GiB"] = peak_gib(call, device)
    return numbers


def build_models(work: Workload, options: argparse.Namespace) -> dict[str, nn.Module]:
    """Return our transformer and diffusers' on the same random weights, both compiled or neither."""
    ours = work.transformer()
    models = {"ours": ours} if options.without_stock else {"ours": ours, "stock": stock_twin(ours)}
    install(ours)
    parallelize(ours, ALONE, compile=options.compile)
    if options.compile and "stock" in models:
        for block in blocks(models["stock"]):
            block.compile()
    return models


@contextmanager
def cpu_trainer(config_file: str, **settings):
    """Yield a trainer on the CPU and remove its files afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "log_video_interval": 0, "valid_video_csv": ""}
        config = load_config(config_file, **settings)
        if config.model.num_threads:
            torch.set_num_threads(config.model.num_threads)
        yield Trainer(config, ALONE, CPU)


def run_iteration(trainer) -> dict[str, float]:
    trainer.iteration += 1
    return trainer.run_iteration()


def bare_calls(trainer) -> None:
    """Run only the model calls of the next iteration."""
    config, pipeline, plan, anchor = trainer.config, trainer.pipeline, trainer.plan, trainer.policy.anchor
    has_anchor = anchor is not None and not anchor.equals_policy
    batch, part = config.rollout.batch_size, config.rows_per_pass
    conditions = trainer.encoder([trainer.collector.requests[0]] * batch)
    latents = torch.zeros(batch, *trainer.collector.noise.shape)
    timestep = torch.full((batch,), 500.0)
    passes = plan.num_trained_steps * batch // part
    needs_old = config.loss.objective == "nft" and plan.updates > 1
    few = latents[:part], timestep[:part], conditions.select(list(range(part)))
    with torch.no_grad():
        for _ in range(config.rollout.grpo_sampling_steps):
            pipeline.velocity(latents, timestep, conditions)
        pipeline.vae.decode(latents)
        for _ in range(passes * needs_old + plan.num_anchor_steps * batch // part * has_anchor):
            pipeline.velocity(*few)
    for _ in range(plan.updates):
        for _ in range(passes // plan.updates):
            pipeline.velocity(*few).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters, 1.0)
        trainer.policy.optimizers.step(config.optimizer.learning_rate)


def benchmark_overhead(options: argparse.Namespace) -> dict:
    with cpu_trainer(options.config, learning_rate=0.0) as trainer:
        calls = {"iteration": partial(run_iteration, trainer), "bare calls": partial(bare_calls, trainer)}
        numbers = compare(calls, options.repeats, CPU) | {"threads": torch.get_num_threads()}
        # The bare calls are those of the next iteration, so they are counted first.
        return numbers | {f"{name}, evaluations": evaluations(trainer, calls[name]) for name in reversed(calls)}


def evaluations(trainer, call: Callable) -> int:
    """Return the number of samples times branches that the transformer evaluates in a call."""
    counted = []
    hook = trainer.pipeline.transformer.register_forward_pre_hook(lambda _model, inputs: counted.append(len(inputs[0])))
    call()
    hook.remove()
    return sum(counted)


def benchmark_reward(options: argparse.Namespace) -> dict:
    is_miniature, count = options.model_path is None, options.clips
    device = choose_device("cpu" if is_miniature else "auto")
    scorer = make_scorer(options.reward_model, options.model_path or "assets/miniature", device=device)
    trial = miniature_trial() if is_miniature else synthetic_trial(81)

    def score(number: int) -> list[dict]:
        return scorer.score([trial.video] * number, [trial.prompt] * number, fps=trial.fps)

    calls = {"one by one": lambda: [score(1)[0] for _ in range(count)], "together": lambda: score(count)}
    numbers = compare(calls, options.repeats, device)
    numbers |= {f"{name}, clips/s": count / numbers[f"{name}, s"] for name in calls}
    pairs = zip(*(call() for call in calls.values()))
    numbers["largest difference"] = max(abs(a[name] - b[name]) for a, b in pairs for name in a)
    if not is_miniature:
        return numbers
    # With two batches of rollouts, the first is scored while the second is sampled.
    batches = {"batch_size": 16, "gradient_accumulation_steps": 2}
    with cpu_trainer(options.config, reward_model=[options.reward_model], **batches) as trainer:
        lines = [run_iteration(trainer) for _ in range(5)][1:]
    for name, what in (("scoring", "scoring, beside other work"), ("reward", "waiting for rewards")):
        shares = [line[f"time/{name}"] / line["time/iteration"] for line in lines]
        numbers[f"{what}, share of an iteration"] = statistics.median(shares)
    return numbers


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="transformer | overhead | reward")
    transformer, overhead, reward = (commands.add_parser(name) for name in ("transformer", "overhead", "reward"))
    transformer.add_argument("--full", action="store_true", help="use the 8.3B configuration")
    transformer.add_argument("--layers", type=int, help="number of blocks")
    transformer.add_argument("--grid", type=int, nargs=3, help="latent frames, height and width")
    transformer.add_argument("--valid", type=int, default=200, help="valid text tokens (200)")
    transformer.add_argument("--compile", action="store_true", help="compile the blocks of both models")
    transformer.add_argument("--without_stock", action="store_true", help="leave out diffusers' model")
    transformer.add_argument("--only", choices=["forward", "training"], help="run one of the two parts")
    overhead.add_argument("--config", default=MINIATURE, help="YAML of the run (configs/miniature.yaml)")
    reward.add_argument("--reward_model", default="miniature_videoalign", help="reward model to time")
    reward.add_argument("--model_path", help="checkpoint folder; default: the miniature's")
    reward.add_argument("--config", default=MINIATURE, help="YAML of the run (configs/miniature.yaml)")
    reward.add_argument("--clips", type=int, default=16, help="number of videos (16)")
    runs = (transformer, benchmark_transformer, 7), (overhead, benchmark_overhead, 9), (reward, benchmark_reward, 5)
    for command, run, repeats in runs:
        command.set_defaults(run=run)
        command.add_argument("--repeats", type=int, default=repeats, help=f"repetitions ({repeats})")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    with exit_on_error("benchmark.py"):
        numbers = options.run(options)
    texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in numbers.items()}
    print(json.dumps(numbers) if options.json else "\n".join(f"{name}: {value}" for name, value in texts.items()))


if __name__ == "__main__":
    main()
