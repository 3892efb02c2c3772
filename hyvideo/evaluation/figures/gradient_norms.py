"""Figure 4: norm of the policy's gradient at each denoising step, beside the theory that the equalizer divides by.

For each stochastic step t of a round of rollouts: the gradient of the mean over the rollouts of the policy term of that
step alone, the KL term off, and its norm over all trained parameters. The term is ``S_t max(...)`` (method.md, 6) and
a norm is homogeneous, so one backward pass gives both: with the equalizer's weight it is what is measured, without it
that divided by ``S_t``. Theory is the scale ``N_t`` of the log-probability's gradient with respect to the velocity. The
way from there to the parameters is not in it, nor is a factor that all steps share.

The JSON that `summarise` makes and ``scripts/measure_gradient_norms.py`` writes:

    sde_type, eta, num_steps, shift, last_step, cfg_scale, seed    of the sampler
    transformer_version, checkpoint        which policy; checkpoint is null for the base
    rounds, rollouts                       rollouts of one round
    steps                                  a list, one object for each stochastic step, from noise to data:
      step, sigma, sigma_next              place in the schedule, and the noise levels it leads between
      std, inverse_std                     of the step's noise
      theory                               N_t
      weight                               S_t = median(N) / N_t
      norm, norms                          without the weight: mean over the rounds, and of each round
      norm_weighted, norms_weighted        with the weight, likewise
    rank_correlation                       Spearman's, of norm with `theory` and with `inverse_std`; null if undefined
    spread                                 largest over smallest `norm` and `norm_weighted`; null where one is 0
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.data.templates import fill
from hyvideo.distributed import checkpoint
from hyvideo.distributed.collectives import average_gradients, clip_gradients
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.policy_update import PolicyUpdate, chunks
from hyvideo.training.rollout_batch import RolloutBatch


def measurement(config: Config, *, rollouts: int, replicas: int, folder: Path) -> Config:
    """Settings of a run, changed so that rounds of ``rollouts`` measure its policy term and leave nothing.

    All steps have noise and are visited in order, also where the run has a window. A missing reward stops the
    measurement: a gradient over fewer rollouts is longer. Raises ValueError where ``replicas`` cannot share the
    rollouts equally.
    """
    batch_size = min(config.rollout.batch_size, max(1, rollouts // replicas))
    if rollouts < 1 or rollouts % (batch_size * replicas):
        needed = f"a multiple of batch_size {batch_size} x {replicas} replicas"
        raise ValueError(f"rollouts must be {needed}, got {rollouts}; choose another number, or another batch_size")
    named = config.record.resume_from_checkpoint
    resumed = checkpoint.find(Path(config.record.output_dir), named) if named else None
    if named and resumed is None:
        raise ValueError(f"there is no checkpoint in output_dir {config.record.output_dir!r} to measure")
    return config.with_settings(
        batch_size=batch_size,
        gradient_accumulation_steps=rollouts // (batch_size * replicas),
        sde_window="",
        match_noise="",  # eta stays, though it was matched in a window
        use_grad_balancing=True,
        enable_timestep_permutation=False,
        timestep_fraction=1.0,
        num_updates_per_rollout=1,
        kl_strategy="flags",
        kl_weight=0.0,
        allow_changed_settings=True,
        check_reward=False,
        max_missing_fraction=0.0,
        valid_video_csv=[],
        report_to=["none"],
        max_steps=10**9,  # above the iteration of any checkpoint
        resume_from_checkpoint=str(resumed or ""),
        output_dir=str(folder),
    )


def norms_per_visit(update: PolicyUpdate, rollouts: RolloutBatch) -> list[float]:
    """Norm of each visit's gradient, weighted as ``update``. Every rank calls, with as many rollouts, all scored."""
    parameters, mesh = update.policy.parameters, update.mesh
    batches = chunks(range(len(rollouts)), update.config.rows_per_pass)
    norms = []
    for turn in range(rollouts.trained_steps.shape[1]):
        for number, rows in enumerate(batches):
            update.policy.gradient_sync.before_backward(is_last=number == len(batches) - 1)
            (update.terms(rollouts, rows, turn, None).loss.sum() / len(rollouts)).backward()
        average_gradients(parameters, mesh, is_sharded=update.policy.is_sharded)
        norms.append(clip_gradients(parameters, math.inf))
        for parameter in parameters:
            parameter.grad = None
    return norms


def summarise(
    settings: Mapping[str, Any], scheduler: FlowMatchDiscreteScheduler, step_weights: Tensor, rounds: list[list[float]]
) -> dict:
    """Content of the JSON but ``rollouts``: settings by flag, each round's norms with ``step_weights`` (steps,)."""
    sampler = {name: settings[name] for name in ("eta", "sde_type")}
    theory = scheduler.compute_log_prob_grad_norms(**sampler).tolist()
    stds, weights, sigmas = scheduler.std_devs(**sampler).tolist(), step_weights.tolist(), scheduler.sigmas.tolist()
    steps = []
    for place, weighted in zip(scheduler.stochastic_steps(**sampler), zip(*rounds, strict=True), strict=True):
        without = [norm / weights[place] for norm in weighted]
        steps.append(
            {
                "step": place,
                "sigma": sigmas[place],
                "sigma_next": sigmas[place + 1],
                "std": stds[place],
                "inverse_std": 1 / stds[place],
                "theory": theory[place],
                "weight": weights[place],
                "norm": sum(without) / len(rounds),
                "norms": without,
                "norm_weighted": sum(weighted) / len(rounds),
                "norms_weighted": list(weighted),
            }
        )
    measured = [step["norm"] for step in steps]
    return {
        **sampler,
        "num_steps": settings["grpo_sampling_steps"],
        **{name: settings[name] for name in ("shift", "last_step", "cfg_scale", "seed", "transformer_version")},
        "checkpoint": settings["resume_from_checkpoint"] or None,
        "rounds": len(rounds),
        "steps": steps,
        "rank_correlation": {
            name: rank_correlation(measured, [step[name] for step in steps]) for name in ("theory", "inverse_std")
        },
        "spread": {name: _spread([step[name] for step in steps]) for name in ("norm", "norm_weighted")},
    }


def table(result: dict) -> str:
    """Lines of the steps, and how well they agree with the theory."""
    return fill(Path(__file__).with_name("gradient_norms.txt.jinja"), **result)


def rank_correlation(first: list[float], second: list[float]) -> float | None:
    """Spearman's correlation, that of the ranks. None where one of the two does not vary."""
    from scipy.stats import rankdata  # takes a while to import

    correlation = torch.corrcoef(torch.from_numpy(rankdata([first, second], axis=1)))[0, 1].item()
    return None if math.isnan(correlation) else correlation


def _spread(values: list[float]) -> float | None:
    return max(values) / min(values) if min(values) > 0 else None
