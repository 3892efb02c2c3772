"""Schedule: the noise levels of a sampler, and the Gaussian transition of each denoising step.

``x = (1 - sigma) x0 + sigma x1`` with data x0 and noise x1. The model takes
``timestep = 1000 sigma`` and predicts the velocity ``x1 - x0``. A schedule never changes. A run
builds one from its settings, and its rollouts carry it to the update. A step is named by its index,
from 0 at the highest noise level.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hyvideo.loss.equalizer import balancing_factors
from hyvideo.loss.trust_region import reference_kl_weight
from hyvideo.schedulers import transitions
from hyvideo.schedulers.transitions import Sampler, Transition, ode_transition, sampler_of

NUM_TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class Step:
    """Result of one step of a batch; all tensors are float32.

    A deterministic step has ``std`` 0, a ``sample`` equal to the mean, and ``log_prob`` 0 without a
    gradient.
    """

    sample: Tensor  # (batch, ...), latent at the next (smaller) sigma
    log_prob: Tensor  # (batch,), mean over the elements of a sample
    mean: Tensor  # (batch, ...), mean of the transition
    std: Tensor  # (batch, 1, ..., 1), standard deviation of the transition


@dataclass(frozen=True)
class Schedule:
    """Noise levels of a sampler and the transition of each step."""

    sampler: Sampler  # step and properties of the sampling method
    sigmas: tuple[float, ...]  # (steps + 1,), from 1 to 0
    transitions: tuple[Transition, ...]  # (steps,)
    # whether the KL to the anchor has the factor `reference_kl_weight`
    reference_conventions: bool = False

    @staticmethod
    def build(
        sde_type: str,
        *,
        num_steps: int,
        shift: float,
        eta: float,
        sigmas: str | None = None,
        last_step: str = "stochastic",
        reference_conventions: bool = False,
    ) -> "Schedule":
        """Return the schedule of a sampler, a built-in name or ``FILE.py:NAME``.

        The noise levels come from ``sigmas`` if it is given, else from ``shift``
        (`levels_of_steps`). ``last_step="stochastic"`` leaves the noise of the last step in the
        final latent, as the paper's configurations do. ``last_step="deterministic"`` ends at x0_hat
        and excludes that step from training. ``reference_conventions`` selects
        `REFERENCE_SAMPLERS`.

        Raises ValueError if a setting is out of range or a step is not defined.
        """
        levels = transitions.levels_of_steps(num_steps, shift, sigmas)
        steps = transitions.schedule(sde_type, levels, eta, last_step, reference_conventions)
        return Schedule(
            sampler_of(sde_type, reference_conventions), levels, steps, reference_conventions
        )

    @staticmethod
    def ode(num_steps: int, shift: float, sigmas: str | None = None) -> "Schedule":
        """Return a schedule without noise, which validation and generation use."""
        return Schedule.at(transitions.levels_of_steps(num_steps, shift, sigmas))

    @staticmethod
    def at(levels: tuple[float, ...]) -> "Schedule":
        """Return a schedule without noise at these levels, of which the last is where the last step
        ends.
        """
        steps = tuple(ode_transition(*pair) for pair in zip(levels, levels[1:]))
        return Schedule(sampler_of("sage_grpo"), levels, steps)

    def with_noise_only_at(self, steps: Iterable[int]) -> "Schedule":
        """Return a copy in which all other steps follow the ODE."""
        chosen = [ode_transition(*pair) for pair in zip(self.sigmas, self.sigmas[1:])]
        for index in steps:
            chosen[index] = self.transitions[index]
        return replace(self, transitions=tuple(chosen))

    @cached_property
    def timesteps(self) -> Tensor:
        """Timesteps at which the steps begin. Shape: (steps,), float32 on the CPU."""
        return NUM_TRAIN_TIMESTEPS * torch.tensor(self.sigmas[:-1])

    @cached_property
    def ends(self) -> Tensor:
        """Timesteps up to which a flow map predicts the mean velocity: where a step ends, or its
        `Transition.until`. Shape: (steps,), float32 on the CPU.
        """
        ends = [
            level if step.until is None else step.until
            for step, level in zip(self.transitions, self.sigmas[1:])
        ]
        return torch.tensor([NUM_TRAIN_TIMESTEPS * level for level in ends])

    @cached_property
    def stochastic_steps(self) -> list[int]:
        """Indices of the steps that have noise and therefore a log-probability."""
        return [index for index, step in enumerate(self.transitions) if step.is_stochastic]

    @cached_property
    def log_prob_grad_norms(self) -> Tensor:
        """Gradient scale ``N_t`` of each step (`Sampler.log_prob_grad_norm`), 0 without noise.

        Shape: (steps,).
        """
        return torch.tensor(
            [self.sampler.log_prob_grad_norm(step) for step in self.transitions],
            dtype=torch.float32,
        )

    @cached_property
    def equalizer_weights(self) -> Tensor:
        """Equalizer's weight ``S_t`` of each step, 0 without noise. Shape: (steps,)."""
        return balancing_factors(self.log_prob_grad_norms)

    @cached_property
    def position_kl_weights(self) -> Tensor:
        """Factor of the KL to the anchor at each step: 1, or `reference_kl_weight`.

        Shape: (steps,).
        """
        if not self.reference_conventions:
            return torch.ones(len(self.transitions))
        weights = []
        for step, sigma, sigma_next in zip(self.transitions, self.sigmas, self.sigmas[1:]):
            width = sigma - sigma_next if self.sampler.has_kl_per_sigma else 1.0
            weights.append(reference_kl_weight(step.std, width))
        return torch.tensor(weights)

    def step(self, velocity: Tensor, sample: Tensor, index: int, noise: Tensor | None) -> Step:
        """Return step ``index`` of all samples with this standard normal ``noise``; None takes the
        mean.

        Shapes: velocity after guidance, sample and noise (batch, ...).
        """
        mean, std = self._moments(velocity, sample, [index] * len(sample))
        if noise is None:
            return self._scored(mean, mean, std)
        return self._scored(mean + std * noise, mean, std)

    def replay(
        self, velocity: Tensor, sample: Tensor, indices: Sequence[int], next_sample: Tensor
    ) -> Step:
        """Return the step that led from each sample to its stored ``next_sample``, scored with
        ``velocity``.

        The log-probability of the transition ``x' ~ N(a x + b v, std^2)`` (docs/sde.md) is the mean
        over a sample's elements of ``-(x' - mean)^2 / (2 std^2) - log(sqrt(2 pi) std)``, for cps
        ``-(x' - mean)^2``; x' is detached. ``indices`` has the step of each sample.

        Shapes: velocity after guidance, sample and next_sample (batch, ...).
        """
        mean, std = self._moments(velocity, sample, indices)
        return self._scored(next_sample.float(), mean, std)

    def means(self, velocity: Tensor, sample: Tensor, indices: Sequence[int]) -> Tensor:
        """Return the mean of each sample's step, float32; ``indices`` has the step of each.

        Shape: (batch, ...).
        """
        return self._moments(velocity, sample, indices)[0]

    def kl_std(self, sample: Tensor, indices: Sequence[int]) -> Tensor:
        """Return the standard deviation in KL terms of each sample's step, float32.

        Shapes: (batch, ...) to (batch, 1, ..., 1).
        """
        steps = [self.transitions[index] for index in indices]
        return _per_sample(
            [step.std if step.kl_std is None else step.kl_std for step in steps], sample
        )

    def _moments(
        self, velocity: Tensor, sample: Tensor, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each sample's step.

        Shapes: (batch, ...), (batch, 1, ..., 1).
        """
        steps = [self.transitions[index] for index in indices]
        a = _per_sample([step.a for step in steps], sample)
        b = _per_sample([step.b for step in steps], sample)
        std = _per_sample([step.std for step in steps], sample)
        return a * sample.float() + b * velocity.float(), std

    def _scored(self, next_sample: Tensor, mean: Tensor, std: Tensor) -> Step:
        log_prob = _log_prob(next_sample.detach(), mean, std, normalised=self.sampler.is_normalised)
        return Step(next_sample, log_prob, mean, std)


def _per_sample(values: list[float], sample: Tensor) -> Tensor:
    """Return one value per sample, shaped to broadcast over ``sample``: (batch, 1, ..., 1)."""
    return filled(values, sample.device).reshape(len(sample), *[1] * (sample.ndim - 1))


def filled(values: Iterable[float], device: torch.device) -> Tensor:
    """Return a float32 tensor of Python numbers, filled on the device without a copy.

    Shape: (values,).
    """
    return torch.cat(
        [torch.full((1,), value, dtype=torch.float32, device=device) for value in values]
    )


def _log_prob(next_sample: Tensor, mean: Tensor, std: Tensor, *, normalised: bool) -> Tensor:
    """Return the mean log-density over a sample's elements, 0 where std is 0. Shape: (batch,).

    Sums are float64, because their order on a GPU depends on the batch shape, which may differ in
    rollout and update.
    """
    is_stochastic = std > 0
    squared = torch.where(is_stochastic, (next_sample - mean) ** 2, 0.0)
    if not normalised:
        return -squared.flatten(1).mean(1, dtype=torch.float64).float()
    safe_std = torch.where(is_stochastic, std, 1.0)
    elementwise = -squared / (2 * safe_std**2) - safe_std.log() - 0.5 * math.log(2 * math.pi)
    return (
        torch.where(is_stochastic, elementwise, 0.0).flatten(1).mean(1, dtype=torch.float64).float()
    )
