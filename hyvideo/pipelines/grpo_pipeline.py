"""Conditions to rollouts to videos: one sampler for the rollout, validation and generation (eta = 0).

The policy is the guided model: its velocity enters the sampler after guidance, in the rollout, in the update and for
the anchor alike. Latents stay float32 whatever the model's precision.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hyvideo.data.videos import pixels
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import Latents, family_of
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler, SdeStepOutput, filled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trajectories:
    """Latents and probabilities of a sampled batch: enough to give every step's probability again."""

    latents: Tensor  # (batch, steps + 1, channels, frames, height, width), from noise to what is decoded
    log_probs: Tensor  # (batch, steps), 0 at deterministic steps
    # (batch, kept steps, channels, frames, height, width), of the transitions that were drawn from; None where not kept
    means: Tensor | None = None

    @property
    def final(self) -> Tensor:
        """The latents to decode. Shape: (batch, channels, frames, height, width)."""
        return self.latents[:, -1]

    @staticmethod
    def cat(parts: list["Trajectories"]) -> "Trajectories":
        fields = zip(*((part.latents, part.log_probs, part.means) for part in parts))
        return Trajectories(*(None if field[0] is None else torch.cat(field) for field in fields))


@dataclass(frozen=True)
class SamplerSettings:
    """Settings of the sampler besides the schedule."""

    sde_type: str = "sage_grpo"
    eta: float = 0.5
    guidance_scale: float = 6.0
    batched_forward: bool = True  # samples and branches in one call of the transformer, else one by one
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # noise levels that are guided

    def guides(self, timestep: float) -> bool:
        """Claims that a velocity there has two branches."""
        low, high = self.guidance_interval
        return self.guidance_scale > 1 and low <= timestep / 1000 <= high


class GRPOPipeline:
    """The models of a run and the ways to call them; knows no rank and no training.

    ``negative`` is the condition of the prompt that guidance leads away from, ``compute_dtype`` the transformer's under
    autocast.
    """

    def __init__(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        scheduler: FlowMatchDiscreteScheduler,
        *,
        sampling: SamplerSettings,
        negative: Condition | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ):
        if sampling.guidance_scale > 1 and negative is None:
            raise ValueError(f"guidance of {sampling.guidance_scale} needs the condition of a negative prompt")
        self.transformer = transformer
        self.vae = vae
        self.scheduler = scheduler
        self.sampling = sampling
        self.negative = negative
        self.compute_dtype = compute_dtype
        self.with_progress = iter  # wraps the loop over the steps, e.g. in a progress bar

    @property
    def device(self) -> torch.device:
        return self.vae.device

    @functools.cached_property
    def latents(self) -> Latents:
        """Shape and scale of the VAE's latents."""
        return family_of(self.vae).latents(self.vae.config)

    @property
    def num_shared_steps(self) -> int:
        """Steps before the first noise: those that rollouts with the same initial latents have in common."""
        stochastic = self.scheduler.stochastic_steps(eta=self.sampling.eta, sde_type=self.sampling.sde_type)
        return min(stochastic, default=len(self.scheduler.timesteps))

    def with_steps(
        self, num_steps: int, *, shift: float | None = None, guidance_scale: float | None = None
    ) -> "GRPOPipeline":
        """The same models under a schedule of its own, of other steps and perhaps another shift and guidance."""
        pipeline = copy.copy(self)
        if guidance_scale is not None:
            pipeline.sampling = replace(self.sampling, guidance_scale=guidance_scale)
        changes = {} if shift is None else {"shift": shift}
        pipeline.scheduler = FlowMatchDiscreteScheduler.from_config(self.scheduler.config, **changes)
        pipeline.scheduler.set_timesteps(num_steps)
        return pipeline

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape of one video's latents: (channels, frames, height, width). `fit_checks.size_problems` has the rules."""
        channels, temporal, spatial, *_ = self.latents
        return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def sample(
        self,
        conditions: Conditions,
        noise: Tensor,
        step_noise: Callable[[int], Tensor],
        *,
        mean_steps: Tensor | None = None,
        origins: list[int] | None = None,
    ) -> Trajectories:
        """Draws one rollout per condition, without gradient.

        Args:
            noise: Initial latents. Shape: (batch, channels, frames, height, width).
            step_noise: Gives the noise of a stochastic step, of the same shape.
            mean_steps: Places in the schedule whose means are kept, in that order. On the CPU. Shape: (batch, kept).
            origins: For each row the first that has its condition and its initial latents: what comes before their
                first noise is computed once.
        """
        latents, log_probs, means = [noise.float()], [], None
        if mean_steps is not None:
            means = latents[0].new_empty(*mean_steps.shape, *noise.shape[1:])
        for i, step in enumerate(self._walk(conditions, noise, step_noise, self.sampling.eta, origins)):
            latents.append(step.prev_sample)
            log_probs.append(step.log_prob)
            for row, place in [] if means is None else (mean_steps == i).nonzero().tolist():
                means[row, place] = step.prev_sample_mean[row]
        return Trajectories(torch.stack(latents, 1), torch.stack(log_probs, 1), means)

    def sample_ode(self, conditions: Conditions, noise: Tensor) -> Tensor:
        """The final latents of sampling without noise, keeping no trajectory. Shape: that of ``noise``."""
        for step in self._walk(conditions, noise, None, 0.0):
            latents = step.prev_sample
        return latents

    @torch.no_grad()
    def _walk(self, conditions: Conditions, noise: Tensor, step_noise, eta: float, origins=None):
        latents = noise.float()
        # At eta 0 a user's sampler need not be the ODE.
        law = {"eta": eta, "sde_type": self.sampling.sde_type if step_noise else "sage_grpo"}
        stochastic = set(self.scheduler.stochastic_steps(**law))
        for i in self.with_progress(range(len(self.scheduler.timesteps))):
            timestep = self.scheduler.timesteps[i].expand(len(latents))
            if origins and i < self.num_shared_steps:
                rows = sorted(set(origins))
                distinct = torch.stack([latents[row] for row in rows])
                of_rows = self.velocity(distinct, timestep[: len(rows)], conditions.select(rows))
                velocity = torch.stack([of_rows[rows.index(row)] for row in origins])
            else:
                velocity = self.velocity(latents, timestep, conditions)
            fresh = step_noise(i) if i in stochastic else None
            step = self.scheduler.sde_step_with_logprob(velocity, latents, timestep, noise=fresh, **law)
            latents = step.prev_sample
            yield step

    def replay(self, sample: Tensor, prev_sample: Tensor, timestep: Tensor, conditions: Conditions) -> SdeStepOutput:
        """Probability of stored transitions under the transformer as it is now: the policy, or the anchor in its place.

        Shapes: latents before and after the step (batch, channels, frames, height, width); timesteps, on the CPU,
        (batch,), a different one per sample allowed.
        """
        law = {"eta": self.sampling.eta, "sde_type": self.sampling.sde_type}
        velocity = self.velocity(sample, timestep, conditions)
        return self.scheduler.sde_step_with_logprob(velocity, sample, timestep, prev_sample=prev_sample, **law)

    def velocity(self, latents: Tensor, timestep: Tensor, conditions: Conditions) -> Tensor:
        """The guided velocity, float32: ``v_negative + scale (v - v_negative)``; one branch where nothing guides.

        Shapes: latents (batch, channels, frames, height, width); timesteps, ``1000 sigma``, on the CPU, (batch,).
        """
        times = timestep.tolist()
        rows = [row for row, time in enumerate(times) if self.sampling.guides(time)]
        opposite = conditions.select(rows).with_text_of(self.negative)
        both = torch.stack([*(latents[row] for row in rows), *latents])
        both = self._forwards(both, [times[row] for row in rows] + times, opposite + conditions)
        negative, velocities = both[: len(rows)], list(both[len(rows) :])
        for row, away in zip(rows, negative):
            velocities[row] = away + self.sampling.guidance_scale * (velocities[row] - away)
        return torch.stack(velocities)

    def num_forwards(self, timestep: Tensor) -> int:
        """Transformer evaluations that give the velocities of samples at these timesteps."""
        return sum(1 + self.sampling.guides(time) for time in timestep.tolist())

    def _forwards(self, latents: Tensor, times: list[float], conditions: Conditions) -> Tensor:
        """The velocity of each sample, by one forward of the transformer or by one for each."""
        if self.sampling.batched_forward or len(latents) == 1:
            return self._forward(latents, times, conditions)
        rows = range(len(latents))
        return torch.cat([self._forward(latents[i : i + 1], times[i : i + 1], conditions.select([i])) for i in rows])

    def _forward(self, latents: Tensor, times: list[float], conditions: Conditions) -> Tensor:
        """The velocity of one forward of the transformer."""
        is_mixed = self.compute_dtype != torch.float32
        autocast = torch.autocast(latents.device.type, self.compute_dtype) if is_mixed else nullcontext()
        # The step-distilled versions take the end of their step as an input.
        ends = self.scheduler.next_timesteps(times) if self.transformer.reads_ends else None
        timestep, ends = (None if values is None else filled(values, latents.device) for values in (times, ends))
        with autocast:
            velocity = self.transformer(latents, timestep=timestep, conditions=conditions.samples, ends=ends)
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: Tensor, *, batch_size: int = 1) -> list[Tensor | None]:
        """Videos on the CPU, uint8 (frames, channels, height, width); None where decoded values are not finite."""
        videos: list[Tensor] = []
        finite: list[Tensor] = []
        for part in latents.split(batch_size):
            decoded = self.vae.decode(self.latents.unscaled(part).to(self.vae.dtype), return_dict=False)[0]
            for video in decoded.transpose(1, 2):
                finite.append(video.isfinite().all())
                videos.append(pixels(video).to("cpu", non_blocking=True))  # into pinned memory
        are_finite = torch.stack(finite).tolist()  # the only wait, for the copies too: they are before it in the stream
        return [video if is_finite else None for video, is_finite in zip(videos, are_finite)]
