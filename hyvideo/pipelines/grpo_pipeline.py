"""Sampling and decoding: one sampler for rollouts (SDE), and for validation and generation (eta = 0).

The policy is the guided model: rollout, update and anchor use the velocity after guidance, the anchor with
``anchor_cfg_scale`` if it is set. Latents are float32 for every model precision.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hyvideo.data.randomness import normal
from hyvideo.data.videos import to_uint8
from hyvideo.models import decoding
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import Latents, family_of
from hyvideo.models.gradient_mode import graphs_of_training
from hyvideo.models.offload import device_of, on_device
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler, SdeStepOutput, filled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trajectories:
    """Latents and log-probabilities of a sampled batch, from which `replay` can recompute every step."""

    # (batch, steps + 1, channels, frames, height, width), from noise to final latents; if not all are kept, only the
    # noise, the latents after the first step and the final latents.
    latents: Tensor
    log_probs: Tensor  # (batch, steps), 0 at deterministic steps
    # (batch, stored steps, channels, frames, height, width), means of the sampled transitions; None if not stored
    means: Tensor | None = None

    @property
    def final(self) -> Tensor:
        """Final latents, to be decoded. Shape: (batch, channels, frames, height, width)."""
        return self.latents[:, -1]

    @staticmethod
    def cat(parts: list["Trajectories"]) -> "Trajectories":
        fields = zip(*((part.latents, part.log_probs, part.means) for part in parts))
        return Trajectories(*(None if field[0] is None else torch.cat(field) for field in fields))


@dataclass(frozen=True)
class SamplerSettings:
    """Sampler settings other than the schedule."""

    sde_type: str = "sage_grpo"
    eta: float = 0.5
    guidance_scale: float = 6.0
    batched_forward: bool = True  # one forward pass for all samples and branches, else one each
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # range of sigma with guidance

    def is_guided(self, timestep: float) -> bool:
        """Return whether guidance applies at this timestep, which then needs two branches."""
        low, high = self.guidance_interval
        return self.guidance_scale > 1 and low <= timestep / 1000 <= high


class GRPOPipeline:
    """Transformer, VAE and scheduler of a run, with sampling, replay and decoding; independent of ranks and training.

    ``negative`` is the condition of the negative prompt; ``compute_dtype`` is the transformer's dtype under autocast.
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
            raise ValueError(f"guidance_scale {sampling.guidance_scale} needs the condition of a negative prompt")
        self.transformer = transformer
        self.vae = vae
        self.scheduler = scheduler
        self.sampling = sampling
        self.negative = negative
        self.compute_dtype = compute_dtype
        self.samples_in_gradient_mode = False  # also without gradient, compiled blocks run the graphs of training
        self.with_progress = iter  # wraps the loop over steps, e.g. in a progress bar
        self.tiles = None  # decodes tile by tile, perhaps on several ranks

    @property
    def device(self) -> torch.device:
        return device_of(self.vae)

    @functools.cached_property
    def latents(self) -> Latents:
        """Shape and scale of the VAE's latents."""
        return family_of(self.vae).latents(self.vae.config)

    def with_steps(
        self, num_steps: int, *, shift: float | None = None, guidance_scale: float | None = None
    ) -> "GRPOPipeline":
        """Return a pipeline with the same models, another number of steps and, if given, shift and guidance scale."""
        pipeline = copy.copy(self)
        if guidance_scale is not None:
            pipeline.sampling = replace(self.sampling, guidance_scale=guidance_scale)
        changes = {} if shift is None else {"shift": shift}
        pipeline.scheduler = FlowMatchDiscreteScheduler.from_config(self.scheduler.config, **changes)
        pipeline.scheduler.set_timesteps(num_steps)
        return pipeline

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return one video's latent shape (channels, frames, height, width)."""
        channels, temporal, spatial, *_ = self.latents
        return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial

    def sample(
        self,
        conditions: Conditions,
        noise: Tensor,
        step_noise: Callable[[int], Tensor],
        *,
        mean_steps: Tensor | None = None,
        keeps_all: bool = True,
    ) -> Trajectories:
        """Sample one rollout per condition, without gradient.

        Args:
            noise: Initial latents. Shape: (batch, channels, frames, height, width).
            step_noise: Function from a stochastic step to its noise, of the same shape.
            mean_steps: Steps whose means are stored, in this order, on the CPU. Shape: (batch, stored steps).
            keeps_all: Keep the latents after every step; False keeps those after the first and the last one.
        """
        latents, log_probs, means = [noise.float()], [], None
        last = len(self.scheduler.timesteps) - 1
        if mean_steps is not None:
            means = latents[0].new_empty(*mean_steps.shape, *noise.shape[1:])
        for i, step in enumerate(self._sample_steps(conditions, noise, step_noise, self.sampling.eta)):
            if keeps_all or i in (0, last):
                latents.append(step.prev_sample)
            log_probs.append(step.log_prob)
            for row, column in [] if means is None else (mean_steps == i).nonzero().tolist():
                means[row, column] = step.prev_sample_mean[row]
        return Trajectories(torch.stack(latents, 1), torch.stack(log_probs, 1), means)

    def sample_ode(self, conditions: Conditions, noise: Tensor) -> Tensor:
        """Return the final latents of deterministic sampling, without a trajectory. Shape: that of ``noise``."""
        for step in self._sample_steps(conditions, noise, None, 0.0):
            latents = step.prev_sample
        return latents

    @torch.no_grad()
    def _sample_steps(self, conditions: Conditions, noise: Tensor, step_noise, eta: float):
        latents = noise.float()
        # A custom sampler may add noise at eta 0; the built-in one does not.
        sde = {"eta": eta, "sde_type": self.sampling.sde_type if step_noise else "sage_grpo"}
        stochastic = set(self.scheduler.stochastic_steps(**sde))
        self.prepare(self.scheduler.timesteps.tolist())
        for i in self.with_progress(range(len(self.scheduler.timesteps))):
            timestep = self.scheduler.timesteps[i].expand(len(latents))
            velocity = self.velocity(latents, timestep, conditions)
            new_noise = step_noise(i) if i in stochastic else None
            step = self.scheduler.sde_step_with_logprob(velocity, latents, timestep, noise=new_noise, **sde)
            latents = step.prev_sample
            yield step

    def replay(self, sample: Tensor, prev_sample: Tensor, timestep: Tensor, conditions: Conditions) -> SdeStepOutput:
        """Return stored transitions, scored under the current weights of the transformer (policy or anchor).

        Shapes: both latents (batch, channels, frames, height, width); timesteps (batch,), on the CPU, may differ.
        """
        sde = {"eta": self.sampling.eta, "sde_type": self.sampling.sde_type}
        velocity = self.velocity(sample, timestep, conditions)
        return self.scheduler.sde_step_with_logprob(velocity, sample, timestep, prev_sample=prev_sample, **sde)

    def velocity(self, latents: Tensor, timestep: Tensor, conditions: Conditions) -> Tensor:
        """Return the guided velocity ``v_negative + scale (v - v_negative)``, or ``v`` without guidance, in float32.

        Shapes: latents (batch, channels, frames, height, width); timesteps ``1000 sigma`` (batch,), on the CPU.
        """
        times = timestep.tolist()
        rows = [row for row, time in enumerate(times) if self.sampling.is_guided(time)]
        unconditional = conditions.select(rows).with_text_of(self.negative)
        stacked = torch.stack([*(latents[row] for row in rows), *latents])
        stacked = self._forwards(stacked, [times[row] for row in rows] + times, unconditional + conditions)
        negatives, velocities = stacked[: len(rows)], list(stacked[len(rows) :])
        for row, negative in zip(rows, negatives):
            velocities[row] = negative + self.sampling.guidance_scale * (velocities[row] - negative)
        return torch.stack(velocities)

    @torch.no_grad()
    def prepare(self, times: list[float]) -> None:
        """Compute what depends on the timesteps of the next forward passes alone, if the transformer caches it."""
        if cache := self.transformer.modulation_cache:
            with self._autocast(self.device):
                cache.prepare(zip(times, self._ends(times)))

    def num_forwards(self, timestep: Tensor) -> int:
        """Return the number of forward passes that the velocities at these timesteps need. Shape: (batch,)."""
        return sum(1 + self.sampling.is_guided(time) for time in timestep.tolist())

    def _forwards(self, latents: Tensor, times: list[float], conditions: Conditions) -> Tensor:
        """Return the velocity of each sample, from one forward pass for all samples or one for each."""
        if self.sampling.batched_forward or len(latents) == 1:
            return self._forward(latents, times, conditions)
        rows = range(len(latents))
        return torch.cat([self._forward(latents[i : i + 1], times[i : i + 1], conditions.select([i]), i) for i in rows])

    def _forward(self, latents: Tensor, times: list[float], conditions: Conditions, row: int = 0) -> Tensor:
        """Return the velocities of one forward pass of the transformer."""
        if cache := self.transformer.step_cache:
            cache.step, cache.row = self.scheduler.index_of(times[0]), row
        timestep = filled(times, latents.device)
        ends = filled(self._ends(times), latents.device) if self.transformer.reads_ends else None
        is_sampling = not torch.is_grad_enabled()
        needs_graphs = is_sampling and self.samples_in_gradient_mode
        with self._autocast(latents.device), graphs_of_training(self.transformer) if needs_graphs else nullcontext():
            if modulation := self.transformer.modulation_cache:
                modulation.select(list(zip(times, self._ends(times))))
            velocity = self.transformer(latents, timestep=timestep, conditions=conditions.samples, ends=ends)
        return velocity.detach().float() if is_sampling else velocity.float()

    def _ends(self, times: list[float]) -> list[float] | list[None]:
        """Return the timesteps at which steps end, which step-distilled models also take; None for other models."""
        return self.scheduler.next_timesteps(times) if self.transformer.reads_ends else [None] * len(times)

    def _autocast(self, device: torch.device) -> AbstractContextManager:
        """Return the context in which the transformer computes."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, batch_size: int = 1) -> list[Tensor | None]:
        """Return uint8 videos on the CPU, None for those with NaN or inf. Shapes: (frames, channels, height, width)."""
        videos: list[Tensor] = []
        finite: list[Tensor] = []
        with on_device(self.vae):
            for part in latents.split(batch_size):
                decoded = decoding.decode(self.vae, self.latents.unscaled(part).to(self.vae.dtype), self.tiles)
                for video in decoded.transpose(1, 2):
                    finite.append(video.isfinite().all())
                    videos.append(to_uint8(video).to("cpu", non_blocking=True))  # into pinned memory
        are_finite = torch.stack(finite).tolist()  # the only synchronization; it also waits for the copies
        return [video if is_finite else None for video, is_finite in zip(videos, are_finite)]

    def try_decoding(self, num_frames: int, height: int, width: int, *, batch_size: int = 1) -> None:
        """Decode one tile of noise on a GPU, so that a lack of memory shows before the first video is sampled."""
        if self.device.type == "cuda":
            tile = decoding.tile_size_of(self.vae)
            shape = self.latent_shape(num_frames, *(min(tile or side, side) for side in (height, width)))
            self.decode(normal((batch_size, *shape), 0, "tile").to(self.device), batch_size=batch_size)
