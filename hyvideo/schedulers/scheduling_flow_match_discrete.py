"""Flow-matching schedule, and sampling steps with log-probabilities.

``x = (1 - sigma) x0 + sigma x1`` with data x0 and noise x1. The schedule is ``shift u / (1 + (shift - 1) u)`` for an
even grid u from 1 to 0. The model takes ``timestep = 1000 sigma`` and predicts the velocity ``x1 - x0``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from hyvideo.grpo.equalizer import balancing_factors
from hyvideo.grpo.trust_region import reference_kl_weight
from hyvideo.schedulers import transitions
from hyvideo.schedulers.transitions import Transition, sampler_of

NUM_TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class SdeStepOutput:
    """Result of one step of a batch; all tensors are float32.

    A deterministic step has ``std_dev_t`` 0, ``prev_sample`` equal to the mean, and ``log_prob`` 0 without a gradient.
    """

    prev_sample: Tensor  # (batch, ...), latent at the next (smaller) sigma
    log_prob: Tensor  # (batch,), mean over the elements of a sample
    prev_sample_mean: Tensor  # (batch, ...), mean of the transition
    std_dev_t: Tensor  # (batch, 1, ..., 1), standard deviation of the transition
    pred_original_sample: Tensor  # (batch, ...), x0_hat = x - sigma v


class FlowMatchDiscreteScheduler(SchedulerMixin, ConfigMixin):
    """Shifted sigma schedule and the step of every sampler; ``sde_type`` is a built-in name or ``FILE.py:NAME``.

    ``last_step="stochastic"`` leaves the noise of the last step in the final latent, as the paper's configurations do.
    ``last_step="deterministic"`` ends at x0_hat and excludes that step from training. ``reference_conventions`` selects
    `REFERENCE_SAMPLERS`.
    """

    order = 1

    @register_to_config
    def __init__(self, shift: float = 5.0, last_step: str = "stochastic", reference_conventions: bool = False):
        if not 0 < shift < math.inf:
            raise ValueError(f"shift must be positive and finite, got {shift}")
        if last_step not in ("stochastic", "deterministic"):
            raise ValueError(f"last_step must be stochastic or deterministic, got {last_step!r}")
        self._levels: tuple[float, ...] = ()
        self._ode: list[Transition] = []
        self._window: frozenset[int] | None = None

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device = "cpu") -> None:
        """Set ``sigmas``, shape (steps + 1,), and ``timesteps``, shape (steps,), both float32 on ``device``."""
        if num_inference_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {num_inference_steps}")
        self._levels = transitions.shifted_levels(num_inference_steps, self.config.shift)
        self.num_inference_steps = num_inference_steps
        self._ode = [transitions.ode_transition(*pair) for pair in zip(self._levels, self._levels[1:])]
        self.sigmas = torch.tensor(self._levels, dtype=torch.float32, device=device)
        self.timesteps = self.sigmas[:-1] * NUM_TRAIN_TIMESTEPS

    def restrict_noise(self, steps: Iterable[int] | None) -> None:
        """Restrict noise to these steps, for every sampler; other steps use the ODE. None removes the restriction."""
        self._window = None if steps is None else frozenset(steps)

    def stochastic_steps(self, *, eta: float = 0.5, sde_type: str = "sage_grpo") -> list[int]:
        """Return the indices of the steps that have noise and therefore a log-probability."""
        return [i for i, step in enumerate(self._transitions(sde_type, eta)) if step.is_stochastic]

    def next_timesteps(self, timesteps: Iterable[float]) -> list[float]:
        """Return the timestep that follows each of ``timesteps``; 0 after the last."""
        return [self._levels[self.index_of(value) + 1] * NUM_TRAIN_TIMESTEPS for value in timesteps]

    def std_devs(self, *, eta: float = 0.5, sde_type: str = "sage_grpo") -> Tensor:
        """Return the standard deviation of each step, 0 at deterministic steps. Shape: (steps,)."""
        return torch.tensor([step.std for step in self._transitions(sde_type, eta)])

    def sde_step_with_logprob(
        self,
        model_output: Tensor,
        sample: Tensor,
        timestep: Tensor | float,
        *,
        eta: float = 0.5,
        sde_type: str = "sage_grpo",
        prev_sample: Tensor | None = None,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> SdeStepOutput:
        """Return the result of one sampled step, or of scoring a given ``prev_sample``.

        The transition ``x' ~ N(a x + b v, std^2)`` is given in docs/sde.md. ``log_prob`` is the mean over a sample's
        elements of ``-(x' - mean)^2 / (2 std^2) - log(sqrt(2 pi) std)``, for cps ``-(x' - mean)^2``; x' is detached.

        Args:
            model_output: Velocity after guidance. Shape: (batch, ...).
            sample: Noisy latent. Shape: (batch, ...).
            timestep: One of ``timesteps`` for the batch, or one per sample. Shape: () or (batch,).
            prev_sample: The latent after the step, to be scored. By default a new one is sampled.
            noise: Standard normal noise of the step. By default it is drawn from ``generator``.
            deterministic: Take the Euler step of the ODE instead.

        Raises ValueError if shapes differ, a timestep is not in the schedule, or ``sde_type`` is unknown.
        """
        _check_shapes(model_output, sample, prev_sample, noise)
        velocity, sample = model_output.float(), sample.float()
        table = self._transitions(sde_type, eta)
        indices = self._indices(timestep, len(sample))
        chosen = [(self._ode if deterministic else table)[i] for i in indices]
        a, b, std = (_per_sample(values, sample) for values in zip(*((t.a, t.b, t.std) for t in chosen)))
        sigma = _per_sample([self._levels[i] for i in indices], sample)
        mean = a * sample + b * velocity
        if prev_sample is None:
            prev_sample = mean
            if any(step.is_stochastic for step in chosen):
                if noise is None:
                    noise = randn_tensor(mean.shape, generator=generator, device=mean.device)
                prev_sample = mean + std * noise
        return SdeStepOutput(
            prev_sample=prev_sample.float(),
            log_prob=_log_prob(prev_sample.float().detach(), mean, std, normalised=sampler_of(sde_type).is_normalised),
            prev_sample_mean=mean,
            std_dev_t=std,
            pred_original_sample=sample - sigma * velocity,
        )

    def compute_log_prob_grad_norms(self, *, eta: float = 0.5, sde_type: str = "sage_grpo") -> Tensor:
        """Return the gradient scale ``N_t`` of each step (`Sampler.log_prob_grad_norm`). Shape: (steps,)."""
        norm = sampler_of(sde_type, self.config.reference_conventions).log_prob_grad_norm
        return torch.tensor([*map(norm, self._transitions(sde_type, eta))], dtype=torch.float32)

    def compute_grad_balancing_factors(self, *, eta: float = 0.5, sde_type: str = "sage_grpo") -> Tensor:
        """Return the equalizer's weights ``S_t``, 0 at deterministic steps. Shape: (steps,)."""
        return balancing_factors(self.compute_log_prob_grad_norms(eta=eta, sde_type=sde_type))

    def position_kl_weights(self, *, eta: float = 0.5, sde_type: str = "sage_grpo") -> Tensor:
        """Return the factor of the KL to the anchor at each step: 1, or `reference_kl_weight`. Shape: (steps,)."""
        if not self.config.reference_conventions:
            return torch.ones(len(self._ode))
        has_widths = sampler_of(sde_type, True).has_kl_per_sigma
        steps = zip(self._transitions(sde_type, eta), self._ode)
        return torch.tensor([reference_kl_weight(step.std, -ode.b if has_widths else 1.0) for step, ode in steps])

    def _transitions(self, sde_type: str, eta: float) -> tuple[Transition, ...]:
        if not self._levels:
            raise ValueError("the scheduler has no timesteps: call set_timesteps first")
        table = transitions.schedule(
            sde_type, self._levels, eta, self.config.last_step, self.config.reference_conventions
        )
        if self._window is None:
            return table
        return tuple(step if i in self._window else self._ode[i] for i, step in enumerate(table))

    def _indices(self, timestep: Tensor | float, batch: int) -> list[int]:
        """Return the step index of each sample. Timesteps on the CPU avoid a GPU synchronization."""
        values = torch.as_tensor(timestep, dtype=torch.float32).flatten().tolist()
        if len(values) not in (1, batch):
            raise ValueError(f"timestep must be a scalar or one value for each of {batch} samples, got {len(values)}")
        indices = [self.index_of(value) for value in values]
        return indices * batch if len(indices) == 1 else indices

    def index_of(self, value: float) -> int:
        index = min(range(self.num_inference_steps), key=lambda i: abs(self._levels[i] * NUM_TRAIN_TIMESTEPS - value))
        if not abs(self._levels[index] * NUM_TRAIN_TIMESTEPS - value) <= 1e-3:  # also rejects NaN
            raise ValueError(
                f"timestep {value} is not in the schedule of {self.num_inference_steps} steps with shift "
                f"{self.config.shift}; use a float32 value of scheduler.timesteps"
            )
        return index


def _check_shapes(model_output: Tensor, sample: Tensor, prev_sample: Tensor | None, noise: Tensor | None) -> None:
    """Raise ValueError if the shapes differ or both ``prev_sample`` and ``noise`` are given."""
    for name, given in (("model_output", model_output), ("prev_sample", prev_sample), ("noise", noise)):
        if given is not None and given.shape != sample.shape:
            raise ValueError(f"{name} must have the shape of sample, {tuple(sample.shape)}, got {tuple(given.shape)}")
    if prev_sample is not None and noise is not None:
        raise ValueError("prev_sample (to score) and noise (to sample) exclude each other: got both, pass one of them")


def _per_sample(values, sample: Tensor) -> Tensor:
    """Return one value per sample, shaped to broadcast over ``sample``: (batch, 1, ..., 1)."""
    return filled(values, sample.device).reshape(len(sample), *[1] * (sample.ndim - 1))


def filled(values: Iterable[float], device: torch.device) -> Tensor:
    """Return a float32 tensor of Python numbers, filled on the device without a copy. Shape: (values,)."""
    return torch.cat([torch.full((1,), value, dtype=torch.float32, device=device) for value in values])


def _log_prob(outcome: Tensor, mean: Tensor, std: Tensor, *, normalised: bool) -> Tensor:
    """Return the mean log-density over a sample's elements, 0 where std is 0. Shape: (batch,).

    Sums are float64, because their order on a GPU depends on the batch shape, which may differ in rollout and update.
    """
    is_stochastic = std > 0
    squared = torch.where(is_stochastic, (outcome - mean) ** 2, 0.0)
    if not normalised:
        return -squared.flatten(1).mean(1, dtype=torch.float64).float()
    safe_std = torch.where(is_stochastic, std, 1.0)
    elementwise = -squared / (2 * safe_std**2) - safe_std.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(is_stochastic, elementwise, 0.0).flatten(1).mean(1, dtype=torch.float64).float()
