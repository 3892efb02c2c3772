"""What an iteration costs beside the bare model calls it makes: ``python -m scripts.benchmark_overhead``.

Iterations of the trainer and the same calls without it (transformer forwards of the rollout, decode, anchor, training
forwards with backward, optimizer step) take turns in one process, so that both see the same machine. Prints medians
and their ratio. Files, checkpoints and validation are not part of either.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from hyvideo.config.command_line import load_config
from hyvideo.distributed.mesh import Mesh
from hyvideo.trainer import Trainer


def bare_calls(trainer: Trainer, with_anchor: bool) -> None:
    """The model calls of one iteration, with nothing around them."""
    config, pipeline = trainer.config, trainer.pipeline
    batch, part = config.rollout.batch_size, config.loss.mini_batch_size_per_update
    conditions = trainer.encoder([trainer.requests[0]] * batch)
    latents = torch.zeros(batch, *trainer.latent_shape)
    timestep = torch.full((batch,), 500.0)
    few, few_conditions = latents[:part], conditions.select(list(range(part)))
    with torch.no_grad():
        for _ in range(config.rollout.grpo_sampling_steps):
            pipeline.velocity(latents, timestep, conditions)
        pipeline.vae.decode(latents)
        if with_anchor:
            for _ in range(trainer.plan.trained_steps * batch // part):
                pipeline.velocity(few, timestep[:part], few_conditions)
    for _ in range(trainer.plan.updates):
        for _ in range(trainer.plan.trained_steps * batch // part // trainer.plan.updates):
            pipeline.velocity(few, timestep[:part], few_conditions).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trainer.policy.parameters, 1.0)
        trainer.policy.optimizers.step(config.optimizer.learning_rate)


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/miniature.yaml")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(options.config, output_dir=str(Path(folder)), log_video_interval=0, valid_video_csv="")
        if config.model.num_threads:
            torch.set_num_threads(config.model.num_threads)
        trainer = Trainer(config, Mesh(rank=0, world_size=1, sp_size=1), torch.device("cpu"))

        def iteration() -> None:
            trainer.iteration += 1
            trainer.run_iteration()

        iteration()  # warm-up, and the anchor is used from the second one on
        iterations, bare = [], []
        for _ in range(options.repeats):
            anchor = trainer.policy.anchor
            with_anchor = anchor is not None and not anchor.equals_policy
            iterations.append(timed(iteration))
            bare.append(timed(lambda with_anchor=with_anchor: bare_calls(trainer, with_anchor)))
    ratio = statistics.median(a / b for a, b in zip(iterations, bare))
    print(
        f"iteration {statistics.median(iterations):.3f} s, bare calls {statistics.median(bare):.3f} s, "
        f"median ratio {ratio:.3f} over {options.repeats} pairs, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
