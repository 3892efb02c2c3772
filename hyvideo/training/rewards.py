"""Rewards of a run: creating and checking the scorers, computing advantages, and counting missing
rewards.
"""

import math
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from hyvideo.data.prompts import read_requests
from hyvideo.distributed.collectives import all_objects, first_reason, merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.loss.advantages import group_advantages, normalized_rewards
from hyvideo.loss.metrics import reward_metrics
from hyvideo.models.placement import Placement
from hyvideo.rewards.identity import files_hash
from hyvideo.rewards.prompt_checks import has_checks
from hyvideo.rewards.rewards import DIMENSIONS, OVERALL, Reward, Scorer, make_scorer, overall
from hyvideo.rewards.scoring import DEADLINE, AsyncScorer, PendingBatch
from hyvideo.rewards.trial import trial_videos, try_scorer
from hyvideo.settings.config import Config
from hyvideo.settings.processes import world_size
from hyvideo.settings.reward_settings import given_reward_weights, reward_options
from hyvideo.settings.sections import DataSettings, RewardSettings
from hyvideo.training.rollout_batch import RolloutIndex


class TooManyMissingRewards(RuntimeError):
    """More rewards of an iteration are missing than ``max_missing_fraction`` allows; the policy was
    not changed.
    """


@dataclass(frozen=True)
class PendingRewards:
    """Videos that this rank has decoded and their pending rewards, in the same order."""

    # by row; None if it contains NaN or inf
    videos: dict[int, Tensor | None] = field(default_factory=dict)
    batches: list[PendingBatch] = field(default_factory=list)


class GroupRewards:
    """Collects the rewards of an iteration and computes advantages within groups, over all
    replicas.
    """

    def __init__(
        self,
        settings: RewardSettings,
        scorer: AsyncScorer,
        mesh: Mesh,
        *,
        group_size: int,
        num_rollouts: int,
    ):
        self.mesh = mesh
        self.scorer = scorer
        self.num_rollouts = num_rollouts
        self.group_size = group_size
        self.clip = settings.advantage_clip
        self.is_normalized = settings.reward_normalization == "group"
        self.weight = 0.0 if settings.ignore_rewards else 1.0
        self.max_missing_fraction = settings.max_missing_fraction

    def wait(
        self, pending: PendingRewards, may_end: Callable[[bool], bool] = bool
    ) -> dict[int, Reward]:
        """Wait for this rank's rewards and return them by row; ``may_end`` as in
        `AsyncScorer.collect`.
        """
        return dict(zip(pending.videos, self.scorer.collect(pending.batches, may_end)))

    def advantages(
        self, indices: Sequence[RolloutIndex], rewards: dict[int, Reward]
    ) -> tuple[Tensor, dict[str, float | list[float]]]:
        """Return this replica's advantages, shape (rollouts,), and the reward metrics; ``rewards``
        are by row.
        """
        numbers = [index.number(self.group_size) for index in indices]
        local = {numbers[row]: reward for row, reward in rewards.items()}
        dimensions, in_order = merge_rewards(local, self.num_rollouts, self.mesh)
        totals = in_order[:, 0]
        weights = {name: weight for name, weight in self.scorer.weights.items() if weight}
        absent = weights.keys() - set(dimensions)
        if self.is_normalized and not absent:  # if a dimension is absent, all rewards are missing
            scores = in_order[:, [1 + dimensions.index(name) for name in weights]]
            scores[~totals.isfinite()] = math.nan
            totals = normalized_rewards(
                scores, scores.new_tensor(list(weights.values())), self.group_size
            )
        advantages = group_advantages(totals, self.group_size, clip=self.clip) * self.weight
        metrics = reward_metrics(in_order, advantages, self.group_size, dimensions)
        metrics |= overall(
            {name: metrics[f"reward/{name}"] for name in dimensions}, "reward/Overall"
        )
        return advantages[numbers].float(), metrics

    def check_failed_rewards(
        self,
        metrics: dict[str, float],
        rewards: dict[int, Reward],
        iteration: int,
    ) -> None:
        """Warn of missing rewards, or raise TooManyMissingRewards on all ranks if there are too
        many.
        """
        missing = metrics["reward/missing"]
        if not missing:
            return
        local = next((reward.reason for reward in rewards.values() if reward.reason), None)
        reason = first_reason(local, self.mesh) or "no reason given"
        summary = (
            f"{missing:.0f} of {self.num_rollouts} rewards of iteration {iteration} are missing"
        )
        if missing > self.max_missing_fraction * self.num_rollouts:
            raise TooManyMissingRewards(
                f"{summary}, more than max_missing_fraction {self.max_missing_fraction} allows; "
                "the policy was not changed. First reason: "
                f"{reason}"
            )
        if self.mesh.is_main:
            print(f"\n{summary}; first reason: {reason}", file=sys.stderr, flush=True)


def merge_rewards(
    local: dict[int, Reward], num_rewards: int, mesh: Mesh
) -> tuple[list[str], Tensor]:
    """Return the names of the dimensions that any rank's scorers returned, and the rewards of all
    ranks in order.

    Shape: (num_rewards, 1 + dimensions), float64: the total and each dimension, NaN where missing.
    """
    scores = {
        row: {k: v for k, v in r.scores.items() if isinstance(v, int | float)}
        for row, r in local.items()
    }
    found = set(chain(*all_objects(list(chain(*scores.values())), mesh))) - {OVERALL}
    names = [*filter(found.__contains__, DIMENSIONS), *sorted(found - set(DIMENSIONS))]
    rows = {
        row: [reward.total, *(scores[row].get(name, math.nan) for name in names)]
        for row, reward in local.items()
    }
    return names, merge_rows(rows, num_rewards, 1 + len(names), mesh)


def gather_rewards(local: Mapping[int, Reward], num_videos: int, mesh: Mesh) -> list[Reward]:
    """Return the rewards of all videos in order, on every rank, missing ones with their reason;
    ``local`` has this rank's by number.
    """
    dimensions, in_order = merge_rewards(local, num_videos, mesh)
    own = {number: reward.reason for number, reward in local.items() if reward.is_missing}
    reasons = ChainMap(*all_objects(own, mesh))
    return [
        Reward(total, dict(zip(dimensions, scores)), reasons.get(number))
        for number, (total, *scores) in enumerate(in_order.tolist())
    ]


def make_async_scorer(
    config: Config,
    device: torch.device,
    scorers: dict[str, Scorer] | None = None,
    placement: Placement | None = None,
) -> AsyncScorer:
    """Return the scorer of a run, from ``scorers`` or the settings, by default where the training has
    it.

    Raises ValueError for invalid options.
    """
    settings = config.reward
    options = reward_options(settings)
    if "yes_no" in options and "checks" not in options["yes_no"]:
        options["yes_no"]["checks"] = _files_with_checks(config.data)
    make = partial(
        AsyncScorer,
        num_threads=config.model.num_threads,
        device=device,
        deadline=config.distributed.reward_deadline if world_size() > 1 else DEADLINE,
    )

    def load(names: Sequence[str]) -> dict[str, Scorer]:
        root = config.model.pretrained_model_root
        return {name: make_scorer(name, root, device=device, **options[name]) for name in names}

    measuring = settings.held_out_reward_model if config.data.valid_video_csv else []
    held_out = make(load(measuring), {}, offload=True, is_held_out=True) if measuring else None
    if scorers is None:
        scorers = load(settings.reward_model)
    weights = given_reward_weights(config.reward)
    is_away = (placement or config.placements.scorers) == Placement.CPU
    return make(scorers, weights, offload=is_away, held_out=held_out)


def _files_with_checks(data: DataSettings) -> list[str]:
    """Return the files of a run's prompts that have questions for the yes/no judge."""
    return [
        path
        for path in dict.fromkeys([*data.prompts_csv, *data.valid_video_csv])
        if has_checks(read_requests(path))
    ]


def reward_digests(config: Config, scorers: Mapping[str, Scorer]) -> dict[str, str]:
    """Return digests of the weights of the built-in scorers that the run loads, by name, and the
    identities of those that are elsewhere, which they know once they have checked the prompts.
    """
    options = reward_options(config.reward)
    root = config.model.pretrained_model_root
    found = {}
    for name in config.reward.reward_model:
        digest = getattr(scorers.get(name), "identity", "") or files_hash(name, root, options[name])
        if digest:
            found[f"reward_model/{name}"] = digest
    return found


def try_scorers(scorer: AsyncScorer, data: DataSettings, prompt: str) -> None:
    """Try the scorers on two videos of the run's size.

    Raises ValueError if one fails, and warns of what may be wrong.
    """
    videos = trial_videos(data.sample_n_frames, data.height, data.width)
    weighted = [name for name, weight in scorer.weights.items() if weight]
    # A single scorer must return every weighted dimension; with several, each must return the
    # dimensions it declares.
    needed = weighted if len(scorer.scorers) == 1 else None
    returned: dict[str, str] = {}  # scorer by name of a score
    for name, model in scorer.scorers.items():
        attempt = partial(try_scorer, model, name, videos, prompt, fps=data.fps, dimensions=needed)
        scores = scorer.call(name, attempt)
        for score in scorer.names.renamed(name, scores):
            if returned.setdefault(score, name) != name:
                both = f"{returned[score]} and {name}"
                raise ValueError(
                    f"rewards {both} both return {score}; declare it in `dimensions`, or rename it"
                )
    absent = [name for name in weighted if name not in returned]
    if absent:
        got = ", ".join(returned)
        raise ValueError(
            f"reward_weights must name scores of the scorers, {got}, got {', '.join(absent)}"
        )
