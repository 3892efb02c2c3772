"""Formulas of the method (arXiv:2603.21872; docs/sde.md), on Python's numbers."""

import math
from collections.abc import Sequence
from statistics import fmean, median_low

SAGE_CLAMP = 0.997  # noise level from which the variance of sage_grpo is that of this level
KL_WINDOW, KL_GAIN = 10, 0.1  # updates that the feedback averages, and its gain


def shifted(u: float, shift: float) -> float:
    """Return the noise level of a value before the shift."""
    return shift * u / (1 + (shift - 1) * u)


def noise_levels(steps: int, shift: float, sigmas: str | None) -> list[float]:
    """Return the levels of a schedule, from 1 to 0."""
    if sigmas:
        return [*map(float, str(sigmas).split(",")), 0.0]
    return [shifted(1 - i / steps, shift) for i in range(steps + 1)]


def variance(sampler: str, sigma: float, after: float, eta: float, second: float) -> float | None:
    """Return the variance that a step adds; None for a sampler that recombines data and noise."""
    width = sigma - after
    if sampler == "sage_grpo":
        if after >= SAGE_CLAMP:
            return 0.0
        integral = math.log((1 - after) / (1 - min(sigma, SAGE_CLAMP))) - width
        return max(0.0, eta**2 * integral)
    if sampler == "flow_grpo":
        return eta**2 * sigma / (1 - (second if sigma == 1 else sigma)) * width
    if sampler == "dance_grpo":
        return eta**2 * width
    return None


def recombined_std(sampler: str, sigma: float, after: float, eta: float) -> float | None:
    """Return the standard deviation of a step that recombines predicted data and noise."""
    if sampler == "cps":
        return after * math.sin(eta * math.pi / 2)
    if sampler == "precise":
        high, low = min(sigma, SAGE_CLAMP), min(after, SAGE_CLAMP)
        rho = min(1.0, low * (1 - high) / (high * (1 - low)))
        return after * math.sqrt(1 - rho ** (eta**2))
    if sampler == "dance_precise":
        if after == 0:
            return 0.0
        return after * math.sqrt(1 - math.exp(-(eta**2) * (1 / after - 1 / sigma)))
    return None


def step_of(
    sampler: str, sigma: float, after: float, eta: float, second: float
) -> tuple[float, float] | None:
    """Return standard deviation and ``d mean / d v`` of a step; None for an unknown sampler."""
    width = sigma - after
    added = variance(sampler, sigma, after, eta, second)
    if added is not None:
        return math.sqrt(added), -width - added / 2 * (1 - sigma) / sigma
    std = recombined_std(sampler, sigma, after, eta)
    if std is None:
        return None
    noise = math.sqrt(max(0.0, after**2 - std**2))
    return std, -sigma * (1 - after) + (1 - sigma) * noise


def gradient_scale(sampler: str, std: float, slope: float, *, gaussian: bool = False) -> float:
    """Return N of a step, the scale of the gradient of its log-probability.

    Source: arXiv:2603.21872, Section 3.2.1.
    """
    if std == 0:
        return 0.0
    if sampler == "cps" and not gaussian:  # whose log-probability is -(x' - mean)^2
        return 2 * abs(slope) * std
    return abs(slope) / std


def equalizer(scales: Sequence[float]) -> list[float]:
    """Return ``median(N) / (N + 1e-8)``, the median over the steps with noise; 0 without noise."""
    noisy = [scale for scale in scales if scale > 0]
    if not noisy:
        return [0.0] * len(scales)
    middle = median_low(noisy)
    return [middle / (scale + 1e-8) if scale > 0 else 0.0 for scale in scales]


def window(text: str, noisy: Sequence[int], iteration: int, draw) -> list[int]:
    """Return the steps of an SDE window; ``draw(n)`` returns the start of a random one."""
    if not text:
        return list(noisy)
    kind, *numbers = text.split(":")
    values = list(map(int, numbers))
    length = values[1] if kind == "fixed" else values[0]
    starts = len(noisy) - length + 1
    if kind == "fixed":
        first = values[0]
    elif kind == "random":
        first = draw(starts)
    else:
        first = (iteration - 1) * (values[1] if len(values) > 1 else 1) % starts
    return list(noisy[first : first + length])


def advantages(rewards: Sequence[float | None], clip: float) -> list[float | None]:
    """Return ``(R - mean) / (std + 1e-8)`` of a group, clipped: None without a reward, and for all of
    a group with fewer than two. Source: arXiv:2603.21872, Section 3.1.
    """
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [None] * len(rewards)
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known))
    if max(known) - min(known) <= 1e-14 * max(1.0, *map(abs, known)):
        return [None if reward is None else 0.0 for reward in rewards]
    return [
        None if reward is None else min(clip, max(-clip, (reward - mean) / (std + 1e-8)))
        for reward in rewards
    ]


def normalised(
    scores: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> list[float | None]:
    """Return the weighted sum of scores that are normalised within a group, by rollout; ``scores``
    has a list for each dimension.
    """
    complete = [all(value is not None for value in row) for row in zip(*scores)]
    columns = [
        advantages([v if ok else None for v, ok in zip(column, complete)], math.inf)
        for column in scores
    ]
    totals = []
    for row in zip(*columns):
        missing = any(value is None for value in row)
        totals.append(None if missing else sum(w * v for w, v in zip(weights, row)))
    return totals


class Coefficient:
    """The coefficient of the KL terms over the updates: a warm-up, then feedback.

    Source: arXiv:2603.21872, Section 3.2.2.
    """

    def __init__(self, settings: dict, warmup: float):
        self.kind = settings.get("kl_schedule", "adaptive")
        self.largest = settings["kl_weight"]
        self.smallest = settings.get("kl_coef", self.largest)
        self.warmup = warmup
        self.target = settings.get("kl_target") or self.largest
        self.updates = 0
        self.seen: list[float] = []
        self.value = self.largest
        if self.kind != "constant":
            self.value = self.smallest if warmup > 0 else self._after(self.smallest)

    def _within(self, value: float) -> float:
        return min(self.largest, max(self.smallest, value))

    def _after(self, value: float) -> float:
        return self.largest if self.kind == "two_stage" else self._within(value)

    def observe(self, kl: float | None) -> None:
        """Go on by one update."""
        if self.kind == "constant" or kl is None:
            return
        self.updates += 1
        self.seen = [*self.seen, kl][-KL_WINDOW:]
        if self.updates < self.warmup + 1:
            share = min(self.updates, self.warmup) / self.warmup
            self.value = self.smallest + (self.largest - self.smallest) * share
            return
        error = (fmean(self.seen) - self.target) / self.target
        change = -KL_GAIN * error
        self.value = self._after(self.value * min(2.0, max(0.5, 1 + change)))


def clipped_loss(advantage: float, ratio: float, weight: float, clip: float) -> float:
    """Return the policy term of a rollout at a step. Source: arXiv:2603.21872, Section 3.2."""
    bounded = min(1 + clip, max(1 - clip, ratio))
    return weight * max(-advantage * ratio, -advantage * bounded)
