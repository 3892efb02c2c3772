"""Sampling and decoding: one sampler for rollouts (SDE), and for validation and generation (ODE).

The policy is the guided model: rollout, update and anchor use the velocity after guidance, the
anchor with ``anchor_cfg_scale`` if it is set. Latents are float32 for every model precision.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hyvideo.data.randomness import normal
from hyvideo.data.videos import to_uint8
from hyvideo.models import decoding
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import Latents, family_of
from hyvideo.models.gradient_mode import graphs_of_training
from hyvideo.models.guidance import Expert, Guidance, expert_at
from hyvideo.models.offload import device_of, on_device
from hyvideo.schedulers.schedule import Schedule, Step, filled

# of each sample: timestep at which its step begins, and ends or None
Times = list[tuple[float, float | None]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trajectories:
    """Latents and log-probabilities of a sampled batch, from which `replay` can recompute every
    step.
    """

    # (batch, steps + 1, channels, frames, height, width), from noise to final latents; if not all
    # are kept, only the noise, the latents after the first step and the final latents.
    latents: Tensor
    log_probs: Tensor  # (batch, steps), 0 at deterministic steps
    # (batch, stored steps, channels, frames, height, width), means of the sampled transitions; None
    # if not stored
    means: Tensor | None = None

    @property
    def final(self) -> Tensor:
        """Final latents, to be decoded. Shape: (batch, channels, frames, height, width)."""
        return self.latents[:, -1]

    @staticmethod
    def cat(parts: list["Trajectories"]) -> "Trajectories":
        means = None
        if parts[0].means is not None:
            means = torch.cat([part.means for part in parts])
        return Trajectories(
            torch.cat([part.latents for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            means,
        )


@dataclass(frozen=True)
class SamplerSettings:
    """Sampler settings other than the schedule."""

    guidance: Guidance = Guidance(6.0)
    batched_forward: bool = True  # one forward pass for all samples and branches, else one each


@dataclass(frozen=True)
class Partner:
    """The frozen expert of a model of two, which predicts where the policy does not."""

    transformer: nn.Module
    expert: Expert
    boundary: float  # noise level from which the high-noise expert predicts


class GRPOPipeline:
    """Transformer and VAE of a run, with sampling, replay and decoding; independent of ranks and
    training.

    ``negative`` is the condition of the negative prompt; ``compute_dtype`` is the transformer's
    dtype under autocast.
    """

    def __init__(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        *,
        sampling: SamplerSettings,
        negative: Condition | None = None,
        compute_dtype: torch.dtype = torch.float32,
        partner: Partner | None = None,
    ):
        self.transformer = transformer
        self.partner = partner
        self.vae = vae
        self.sampling = sampling
        self.negative = negative
        self.compute_dtype = compute_dtype
        # also without gradient, compiled blocks run the graphs of training
        self.samples_in_gradient_mode = False
        self.with_progress = iter  # wraps the loop over steps, e.g. in a progress bar
        # samples that passed through a transformer, without and with gradient
        self.evaluations: Counter[str] = Counter()
        self.tiles = None  # decodes tile by tile, perhaps on several ranks

    @property
    def device(self) -> torch.device:
        return device_of(self.vae)

    @functools.cached_property
    def latents(self) -> Latents:
        """Shape and scale of the VAE's latents."""
        return family_of(self.vae).latents(self.vae.config)

    @property
    def transformers(self) -> list[nn.Module]:
        """The transformer and, of a model of two experts, its partner."""
        return [self.transformer, *([self.partner.transformer] if self.partner else [])]

    def with_guidance(self, guidance: Guidance) -> "GRPOPipeline":
        """Return a pipeline with the same models and another guidance."""
        pipeline = copy.copy(self)
        pipeline.sampling = replace(self.sampling, guidance=guidance)
        return pipeline

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return one video's latent shape (channels, frames, height, width)."""
        return decoding.latent_shape(self.vae, num_frames, height, width)

    def sample(
        self,
        conditions: Conditions,
        noise: Tensor,
        schedule: Schedule,
        step_noise: Callable[[int], Tensor] | None,
        *,
        mean_steps: Tensor | None = None,
        keeps_all: bool = True,
    ) -> Trajectories:
        """Sample one rollout per condition, without gradient.

        Args:
            noise: Initial latents. Shape: (batch, channels, frames, height, width).
            step_noise: Function from a stochastic step to its noise, of the same shape. None for an
                ODE.
            mean_steps: Steps whose means are stored, in this order, on the CPU. Shape: (batch,
                stored steps).
            keeps_all: Keep the latents after every step; False keeps those after the first and the
                last one.
        """
        latents = [noise.float()]
        log_probs = []
        means = None
        last = len(schedule.transitions) - 1
        if mean_steps is not None:
            means = latents[0].new_empty(*mean_steps.shape, *noise.shape[1:])
        for i, step in enumerate(self._sample_steps(conditions, noise, schedule, step_noise)):
            if keeps_all or i in (0, last):
                latents.append(step.sample)
            log_probs.append(step.log_prob)
            if means is not None:
                for row, column in (mean_steps == i).nonzero().tolist():
                    means[row, column] = step.mean[row]
        return Trajectories(torch.stack(latents, 1), torch.stack(log_probs, 1), means)

    def sample_ode(self, conditions: Conditions, noise: Tensor, schedule: Schedule) -> Tensor:
        """Return the final latents of the ODE at the levels of ``schedule``, without a trajectory.

        Shape: as ``noise``.
        """
        for step in self._sample_steps(conditions, noise, schedule.with_noise_only_at([]), None):
            latents = step.sample
        return latents

    @torch.no_grad()
    def _sample_steps(
        self,
        conditions: Conditions,
        noise: Tensor,
        schedule: Schedule,
        step_noise: Callable[[int], Tensor] | None,
    ) -> Iterator[Step]:
        latents = noise.float()
        self.prepare_schedule(schedule)
        current = None
        # of offloaded experts, only that of the step is on the device
        with ExitStack() as places:
            for index in self.with_progress(range(len(schedule.transitions))):
                transformer = self._transformer_at(self._times(schedule, [index]))
                if transformer is not current:
                    places.close()
                    places.enter_context(on_device(transformer))
                    current = transformer
                velocity = self.velocity_at_steps(
                    latents, schedule, [index] * len(latents), conditions
                )
                new_noise = step_noise(index) if schedule.transitions[index].is_stochastic else None
                step = schedule.step(velocity, latents, index, new_noise)
                latents = step.sample
                yield step

    def replay(
        self,
        sample: Tensor,
        next_sample: Tensor,
        schedule: Schedule,
        steps: list[int],
        conditions: Conditions,
    ) -> Step:
        """Return stored transitions, scored under the current weights of the transformer (policy or
        anchor).

        ``steps`` has the step of each sample. Shape of the latents before and after it: (batch,
        channels, frames, height, width).
        """
        velocity = self.velocity_at_steps(sample, schedule, steps, conditions)
        return schedule.replay(velocity, sample, steps, next_sample)

    def velocity_at_steps(
        self, latents: Tensor, schedule: Schedule, steps: list[int], conditions: Conditions
    ) -> Tensor:
        """Return the guided velocity of each sample at its step of the schedule.

        Shape: as ``latents``.
        """
        return self._guided_velocity(latents, self._times(schedule, steps), conditions)

    @torch.no_grad()
    def mean_velocity(
        self,
        latents: Tensor,
        schedule: Schedule,
        starts: list[int],
        num_steps: int,
        conditions: Conditions,
    ) -> Tensor:
        """Return the mean guided velocity of ``num_steps`` ODE steps, weighted by their widths,
        without gradient.

        It is the difference of the latents after and before these steps, divided by that of the
        levels; with one step it is exactly the velocity. ``starts`` has the first step of each
        sample. Shape: as ``latents``.
        """
        sample = latents.float()
        mean = torch.zeros_like(sample)
        widths = [schedule.sigmas[start] - schedule.sigmas[start + num_steps] for start in starts]
        for number in range(num_steps):
            steps = [start + number for start in starts]
            velocity = self.velocity_at_steps(sample, schedule, steps, conditions)
            shares = [
                (schedule.sigmas[step] - schedule.sigmas[step + 1]) / width
                for step, width in zip(steps, widths)
            ]
            mean = mean + filled(shares, sample.device).view(-1, 1, 1, 1, 1) * velocity
            sample = schedule.means(velocity, sample, steps)
        return mean

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditions: Conditions,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Return the guided velocity ``v_negative + scale (v - v_negative)``, or ``v`` without
        guidance, in float32.

        Timesteps need not belong to a schedule. A flow map, which reads where a step ends, returns
        the mean velocity from ``timestep`` to ``ends``.

        Shapes: latents (batch, channels, frames, height, width); timesteps ``1000 sigma`` and
        ends, which only flow maps have, (batch,), on the CPU.
        """
        assert self.transformer.is_flow_map == (ends is not None), "only flow maps read ends"
        starts = timestep.tolist()
        stops = [None] * len(starts) if ends is None else ends.tolist()
        return self._guided_velocity(latents, list(zip(starts, stops)), conditions)

    def _guided_velocity(self, latents: Tensor, times: Times, conditions: Conditions) -> Tensor:
        """Return the guided velocity of each sample at its time: see `velocity`."""
        scales = [self.sampling.guidance.scale_at(start / 1000) for start, _ in times]
        rows = [row for row, scale in enumerate(scales) if scale > 1]
        unconditional = conditions.select(rows).with_text_of(self.negative)
        stacked = torch.stack([*(latents[row] for row in rows), *latents])
        stacked = self._forwards(
            stacked, [times[row] for row in rows] + times, unconditional + conditions
        )
        negatives = stacked[: len(rows)]
        velocities = list(stacked[len(rows) :])
        for row, negative in zip(rows, negatives):
            velocities[row] = negative + scales[row] * (velocities[row] - negative)
        return torch.stack(velocities)

    @torch.no_grad()
    def prepare(self, times: Times) -> None:
        """Compute what depends on the timesteps of the next forward passes alone, if the
        transformer caches it.
        """
        for transformer in self.transformers:
            if transformer.modulation_cache:
                own = [time for time in times if self._transformer_at([time]) is transformer]
                with self._autocast(self.device):
                    transformer.modulation_cache.prepare(own)

    def prepare_schedule(self, schedule: Schedule) -> None:
        """Call `prepare` for all steps of a schedule."""
        self.prepare(self._times(schedule, range(len(schedule.transitions))))

    def first_own_step(self, schedule: Schedule) -> int:
        """Return the first step that the transformer makes, and not its partner; 0 if there is
        none.
        """
        times = self._times(schedule, range(len(schedule.transitions)))
        makers = [self._transformer_at([time]) for time in times]
        return makers.index(self.transformer) if self.transformer in makers else 0

    def num_forwards(self, timestep: Tensor) -> int:
        """Return the number of forward passes that the velocities at these timesteps need.

        Shape: (batch,).
        """
        return sum(self.sampling.guidance.num_branches(time / 1000) for time in timestep.tolist())

    def _times(self, schedule: Schedule, steps: Sequence[int]) -> Times:
        """Return the timesteps at which each sample's step begins and, for models that read it,
        ends.
        """
        starts = schedule.timesteps.tolist()
        ends = [None] * len(starts)
        if self.transformer.is_flow_map:
            ends = schedule.ends.tolist()
        return [(starts[step], ends[step]) for step in steps]

    def _forwards(self, latents: Tensor, times: Times, conditions: Conditions) -> Tensor:
        """Return the velocity of each sample, from one forward pass for all samples or one for
        each.
        """
        if self.sampling.batched_forward or len(latents) == 1:
            return self._forward(latents, times, conditions)
        rows = range(len(latents))
        return torch.cat(
            [
                self._forward(latents[i : i + 1], times[i : i + 1], conditions.select([i]))
                for i in rows
            ]
        )

    def _forward(self, latents: Tensor, times: Times, conditions: Conditions) -> Tensor:
        """Return the velocities of one forward pass of a transformer."""
        transformer = self._transformer_at(times)
        timestep = filled([start for start, _ in times], latents.device)
        ends = None
        if self.transformer.is_flow_map:
            ends = filled([end for _, end in times], latents.device)
        is_sampling = not torch.is_grad_enabled()
        self.evaluations["sampling" if is_sampling else "training"] += len(latents)
        graphs: AbstractContextManager = nullcontext()
        if is_sampling and self.samples_in_gradient_mode:
            graphs = graphs_of_training(transformer)
        with self._autocast(latents.device), graphs, on_device(transformer):
            if transformer.modulation_cache:
                transformer.modulation_cache.select(times)
            velocity = transformer(
                latents, timestep=timestep, conditions=conditions.samples, ends=ends
            )
        return velocity.detach().float() if is_sampling else velocity.float()

    def _transformer_at(self, times: Times) -> nn.Module:
        """Return the transformer that predicts at these times, which are of one expert."""
        if self.partner is None:
            return self.transformer
        experts = {expert_at(start / 1000, self.partner.boundary) for start, _ in times}
        assert len(experts) == 1, f"the times of a forward pass are of both experts: {times}"
        return self.partner.transformer if self.partner.expert in experts else self.transformer

    def _autocast(self, device: torch.device) -> AbstractContextManager:
        """Return the context in which the transformer computes."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, batch_size: int = 1) -> list[Tensor | None]:
        """Return uint8 videos on the CPU, None for those with NaN or inf.

        Shapes: (frames, channels, height, width).
        """
        videos: list[Tensor] = []
        finite: list[Tensor] = []
        with on_device(self.vae):
            for part in latents.split(batch_size):
                decoded = decoding.decode(
                    self.vae, self.latents.unscaled(part).to(self.vae.dtype), self.tiles
                )
                for video in decoded.transpose(1, 2):
                    finite.append(video.isfinite().all())
                    # into pinned memory
                    videos.append(to_uint8(video).to("cpu", non_blocking=True))
        # the only synchronization; it also waits for the copies
        are_finite = torch.stack(finite).tolist()
        return [video if is_finite else None for video, is_finite in zip(videos, are_finite)]

    def decode_with_gradient(self, latents: Tensor) -> Tensor:
        """Return videos in [-1, 1] with their gradient by the latents, on the VAE's device and in
        its precision.

        On a GPU, the decoder's features are computed again in the backward pass, tile by tile.

        Shape: (batch, channels, frames, height, width).
        """
        scaled = self.latents.unscaled(latents).to(self.vae.dtype)
        return decoding.decode_with_gradient(self.vae, scaled, recompute=latents.is_cuda)

    def try_decoding(
        self, num_frames: int, height: int, width: int, *, batch_size: int = 1
    ) -> None:
        """Decode one tile of noise on a GPU, so that a lack of memory shows before the first video
        is sampled.
        """
        if self.device.type == "cuda":
            noise = self.noise_of_tile(num_frames, height, width, batch_size=batch_size)
            self.decode(noise, batch_size=batch_size)

    def noise_of_tile(self, num_frames: int, height: int, width: int, *, batch_size: int) -> Tensor:
        """Return noise in place of the latents of one tile of ``batch_size`` videos.

        Shape: (batch, channels, frames, height, width).
        """
        tile = decoding.tile_size_of(self.vae)
        shape = self.latent_shape(
            num_frames, *(min(tile or side, side) for side in (height, width))
        )
        return normal((batch_size, *shape), 0, "tile").to(self.device)
