"""One iteration of the loop (Algorithm 1 of arXiv:2603.21872), in the order of its data:

    prompts -> conditions -> rollouts (or given videos) -> rewards -> advantages -> update -> metrics

A batch of rollouts is scored in the background while the next one is sampled, or all are scored
after the last one (``offload reward``).
"""

from typing import Any, NamedTuple

from hyvideo.models.offload import come_back
from hyvideo.models.placement import Placement
from hyvideo.rewards.rewards import Reward
from hyvideo.training.rewards import PendingRewards
from hyvideo.training.rollout_batch import RolloutBatch, forbid_changes
from hyvideo.training.run import Run


class Collected(NamedTuple):
    """What an update trains on: the data of an iteration on this replica."""

    rollouts: RolloutBatch  # with advantages
    reference: Any  # what the loss compares the policy with; from `Objective.prepare`
    metrics: dict[str, float]  # of the rewards


def train_iteration(run: Run, iteration: int) -> dict[str, float]:
    """Collect what an iteration trains on, update the policy, and return the metrics by name.
    Collective.

    Raises TooManyMissingRewards, OffPolicyError, and what code of the user raises.
    """
    run.objective.cost.start()
    run.pipeline.evaluations.clear()  # those of a validation
    rollouts, reference, metrics = collect(run, iteration)
    with run.progress.timed("update"):
        updated = run.update(rollouts, reference, iteration)
    _record_update(run, rollouts)
    return {
        "iteration": iteration,
        "update": run.update.update_count,
        **metrics,
        **updated,
        "anchor/age": run.policy.anchor.age if run.policy.anchor else 0,
        "cost/forwards": run.objective.cost.forwards / len(rollouts),
    }


def collect(run: Run, iteration: int) -> Collected:
    """Return what an iteration trains on, with advantages. Collective.

    The last batch of rollouts is scored beside the anchor's forward passes. With
    ``offload reward``, all are scored before them, while the GPU is otherwise idle.
    """
    rollouts, pending = sample(run, iteration)
    if not run.scores_rollouts:
        return Collected(rollouts, _prepare(run, rollouts), {})
    if run.config.placements.scorers == Placement.CPU:
        rewards = _wait(run, pending)
        reference = _prepare(run, rollouts)
    else:
        reference = _prepare(run, rollouts)
        rewards = _wait(run, pending)
    advantages, metrics = run.rewards.advantages(rollouts.indices, rewards)
    rollouts = rollouts.with_rewards(rewards, advantages.to(run.pipeline.device))
    with run.progress.timed("record"):
        missing = metrics["reward/missing"]
        run.recorder.record(rollouts, pending.videos, iteration, num_missing=missing)
    run.rewards.check_failed_rewards(metrics, rewards, iteration)
    return Collected(rollouts, reference, metrics)


def sample(run: Run, iteration: int) -> tuple[RolloutBatch, PendingRewards]:
    """Return the rollouts or given videos of an iteration before their rewards, and this rank's
    videos with the rewards that are being computed. Collective.
    """
    prompts = run.source.choose(iteration)
    with run.progress.timed("conditions", f"{len(prompts.requests)} prompts"):
        conditions = run.source.encode(prompts.requests)
    return run.source.collect(prompts, conditions)


def _prepare(run: Run, rollouts: RolloutBatch) -> Any:
    """Return `Objective.prepare`, usually the forward passes of the anchor (``time/anchor``)."""
    with run.progress.timed("anchor"), forbid_changes(rollouts, run.objective.name):
        return run.objective.prepare(rollouts)


def _wait(run: Run, pending: PendingRewards) -> dict[int, Reward]:
    """Return this rank's rewards by row, when all are computed."""
    with run.progress.timed("reward", f"{run.inputs.plan.rollouts} videos"):
        rewards = run.rewards.wait(pending, run.progress.signals.all_ready)
    come_back(run.policy.transformer)
    return rewards


def _record_update(run: Run, rollouts: RolloutBatch) -> None:
    """Write the iteration's line of audit.jsonl, on the main rank. Collective."""
    weights = run.objective.weights_by_step(rollouts.schedule)
    line = run.update.ledger.line(rollouts, rollouts.iteration, weights, run.pipeline.evaluations)
    if line and run.recorder.writer:
        run.recorder.writer.log_audit(line)
