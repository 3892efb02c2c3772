"""Measure the policy's gradient norm at each denoising step and compare it with theory: Figure 4 of the paper.

    python -m examples.gradient_norms --config configs/miniature.yaml --output_path outputs/gradients.json
    python -m examples.gradient_norms --config configs/miniature.yaml --output_path cps.json --sde_type cps
    torchrun --nproc_per_node=8 -m examples.gradient_norms --config configs/hunyuanvideo15_480p_8gpu.yaml \\
        --output_path outputs/gradients.json --rollouts 16

Also accepts the flags of post_train.py; --resume_from_checkpoint measures a checkpoint instead of the base model. Does
not train. Writes only the JSON, and encoded prompts with --conditions_dir. The exit code is 2 for a usage error.

For each stochastic step t, the loss is the mean over rollouts of the policy term of that step alone; its gradient norm
is taken over all trained parameters. The equalizer multiplies the term by ``S_t``: the weighted norm is measured, and
dividing it by ``S_t`` gives the unweighted one. The theoretical norm ``N_t``, of the log-probability's gradient with
respect to the velocity, omits the path from the velocity to the parameters and a factor common to all steps.

The JSON has these fields:

    sde_type, eta, num_steps, shift, last_step, cfg_scale, seed    of the sampler
    transformer_version, checkpoint        of the policy; checkpoint is null for the base model
    rollouts                               number of rollouts
    steps                                  a list, one object for each stochastic step, from noise to data:
      step, sigma, sigma_next              index in the schedule, and noise levels before and after the step
      std, inverse_std                     of the step's noise
      theory, weight                       N_t and S_t = median(N) / N_t
      norm, norm_weighted                  unweighted and weighted norm
    rank_correlation                       Spearman's, of norm with `theory` and with `inverse_std`; null if undefined
    spread                                 largest over smallest `norm` and `norm_weighted`; null if one is 0
"""

import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyvideo.config import processes
from hyvideo.config.command_line import parse, read_yaml
from hyvideo.config.rules import check
from hyvideo.config.settings import Config
from hyvideo.data.outside import Parser, exit_on_error, make_folder
from hyvideo.data.templates import fill
from hyvideo.distributed import checkpoint
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import average_gradients, clip_gradients
from hyvideo.records.run_files import write_json
from hyvideo.records.stage_timer import StageTimer
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.policy_update import PolicyUpdate, chunks
from hyvideo.training.rollout_batch import RolloutBatch
from post_train import build


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output_path", dest="out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rollouts", type=int, default=8, help="number of rollouts, over all processes")
    options, flags = parser.parse_known_args(argv)
    command = parse(flags)
    if command.print_config:
        parser.error("--print_config is a flag of post_train.py only")
    folder = options.out.with_name(f".{options.out.name}.run")  # ranks may share conditions in it
    try:
        with exit_on_error("gradient_norms.py"):
            measure(command.config, options.out, folder, options.rollouts)
    finally:
        if processes.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    ranks.stop()


def measure(config: Config, out: Path, folder: Path, rollouts: int) -> None:
    """Write the measurement to ``out``. Raises ValueError for settings that cannot be measured."""
    replicas = max(1, processes.world_size() // config.distributed.sp_size)
    config = measurement(config, rollouts=rollouts, replicas=replicas, folder=folder)
    check(config, processes.world_size())
    make_folder(out.parent)
    with ExitStack() as at_end:
        trainer = build(config, at_end)
        trainer.bar.total = trainer.iteration + 1
        norms = norms_per_visit(trainer.update, scored_rollouts(trainer))
    if trainer.mesh.is_main:
        result = summarise(config.flat(), trainer.pipeline.scheduler, trainer.update.step_weights, norms)
        write_json(out, result | {"rollouts": rollouts})
        print(table(result))
        print(f"written to {out}")


def scored_rollouts(trainer):
    """Return the next iteration's rollouts with advantages."""
    trainer.iteration += 1
    rollouts, pending = trainer.collector.collect(trainer.iteration, StageTimer(trainer.device, trainer.progress.enter))
    rewards = trainer.rewards.wait(pending)
    advantages, metrics = trainer.rewards.advantages(rollouts.indices, rewards)
    trainer.rewards.check_failed_rewards(metrics, rewards, trainer.iteration)
    trainer.update.refresh_step_weights()
    return rollouts.with_rewards(rewards, advantages.to(trainer.device))


def measurement(config: Config, *, rollouts: int, replicas: int, folder: Path) -> Config:
    """Return the settings of a run, changed to measure its policy term over ``rollouts`` without training.

    All steps add noise and are visited in order; a missing reward stops. ValueError if ``replicas`` cannot divide the
    rollouts.
    """
    batch_size = min(config.rollout.batch_size, max(1, rollouts // replicas))
    if rollouts < 1 or rollouts % (batch_size * replicas):
        needed = f"a multiple of batch_size {batch_size} x {replicas} replicas"
        raise ValueError(f"rollouts must be {needed}, got {rollouts}; change it or batch_size")
    named = config.record.resume_from_checkpoint
    resumed = checkpoint.find(Path(config.record.output_dir), named) if named else None
    if named and resumed is None:
        raise ValueError(f"output_dir {config.record.output_dir!r} has no complete checkpoint to measure")
    fixed = read_yaml(Path(__file__).with_suffix(".yaml"))
    fixed |= {"resume_from_checkpoint": str(resumed or ""), "output_dir": str(folder), "batch_size": batch_size}
    return config.with_settings(**fixed, gradient_accumulation_steps=rollouts // (batch_size * replicas))


def norms_per_visit(update: PolicyUpdate, rollouts: RolloutBatch) -> list[float]:
    """Return the weighted gradient norm of each step in visiting order. Called on every rank, with scored rollouts."""
    parameters, mesh = update.policy.parameters, update.mesh
    batches = chunks(range(len(rollouts)), update.config.rows_per_pass)
    norms = []
    for column in range(rollouts.trained_steps.shape[1]):
        for number, rows in enumerate(batches):
            update.policy.gradient_sync.before_backward(is_last=number == len(batches) - 1)
            (update.terms(rollouts, rows, column, None).loss.sum() / len(rollouts)).backward()
        average_gradients(parameters, mesh, is_sharded=update.policy.is_sharded)
        norms.append(clip_gradients(parameters, math.inf))
        for parameter in parameters:
            parameter.grad = None
    return norms


def summarise(
    settings: Mapping[str, Any], scheduler: FlowMatchDiscreteScheduler, step_weights: Tensor, norms: list[float]
) -> dict:
    """Return the content of the JSON without ``rollouts``; ``norms`` were measured with ``step_weights`` (steps,)."""
    sampler = {name: settings[name] for name in ("eta", "sde_type")}
    theory = scheduler.compute_log_prob_grad_norms(**sampler).tolist()
    stds, weights, sigmas = scheduler.std_devs(**sampler).tolist(), step_weights.tolist(), scheduler.sigmas.tolist()
    steps = [
        {
            "step": place,
            "sigma": sigmas[place],
            "sigma_next": sigmas[place + 1],
            "std": stds[place],
            "inverse_std": 1 / stds[place],
            "theory": theory[place],
            "weight": weights[place],
            "norm": weighted / weights[place],
            "norm_weighted": weighted,
        }
        for place, weighted in zip(scheduler.stochastic_steps(**sampler), norms, strict=True)
    ]
    measured = [step["norm"] for step in steps]
    return {
        **sampler,
        "num_steps": settings["grpo_sampling_steps"],
        **{name: settings[name] for name in ("shift", "last_step", "cfg_scale", "seed", "transformer_version")},
        "checkpoint": settings["resume_from_checkpoint"] or None,
        "steps": steps,
        "rank_correlation": {
            name: rank_correlation(measured, [step[name] for step in steps]) for name in ("theory", "inverse_std")
        },
        "spread": {name: _spread([step[name] for step in steps]) for name in ("norm", "norm_weighted")},
    }


def table(result: dict) -> str:
    """Format the steps and their agreement with the theory."""
    return fill(Path(__file__).with_name("gradient_norms.txt.jinja"), **result)


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Return Spearman's rank correlation, or None if one of the two is constant."""
    from scipy.stats import rankdata  # slow to import

    correlation = torch.corrcoef(torch.from_numpy(rankdata([first, second], axis=1)))[0, 1].item()
    return None if math.isnan(correlation) else correlation


def _spread(values: list[float]) -> float | None:
    return max(values) / min(values) if min(values) > 0 else None


if __name__ == "__main__":
    main()
