"""Predicted length of the whole run: hours if the rate of the GPU can be predicted, else forward
passes.
"""

from dataclasses import dataclass, replace

from hyvideo.planning.cost import COMPILATION, duration, forwards_per_rollout, validation_seconds
from hyvideo.planning.disk import num_saves, rank_checkpoint_bytes
from hyvideo.planning.hardware import SLOWER, Hardware
from hyvideo.planning.overheads import pageable_seconds
from hyvideo.planning.planned_run import PlannedRun


@dataclass(frozen=True)
class WholeRun:
    """Number and seconds of the iterations and validations of a run, and of its compilation."""

    iterations: int
    iteration_seconds: float
    validations: int
    validation_videos: int
    validation_seconds: float
    compilation_seconds: float
    saves: int  # checkpoints
    save_seconds: float  # for which a checkpoint stops training
    num_gpus: int
    forwards: float  # forward passes in total; a training forward and backward counts as 3 to 4

    @property
    def seconds(self) -> float:
        computing = (
            self.iterations * self.iteration_seconds + self.validations * self.validation_seconds
        )
        return computing + self.saves * self.save_seconds + self.compilation_seconds

    @property
    def validation_share(self) -> float:
        """Fraction of the run's time that is spent on validation."""
        return self.validations * self.validation_seconds / self.seconds

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.seconds / 3600


def whole_run(run: PlannedRun) -> WholeRun:
    """Return the length of a run. Raises ValueError for unreadable validation prompts."""
    settings = run.settings
    videos = run.num_validated * settings.validation_repeats
    validations = run.num_validations
    per_video = settings.validation_steps * (run.validation or run).plan.sampled_branches
    return WholeRun(
        iterations=settings.max_steps,
        iteration_seconds=duration(run).total,
        validations=validations,
        validation_videos=videos,
        validation_seconds=validation_seconds(run, videos),
        compilation_seconds=COMPILATION if settings.enable_compile == "true" else 0.0,
        saves=num_saves(run),
        save_seconds=pageable_seconds(rank_checkpoint_bytes(run)),
        num_gpus=run.world_size,
        forwards=settings.max_steps * run.plan.rollouts * forwards_per_rollout(run)
        + validations * videos * per_video,
    )


def slower_hardware(hardware: Hardware) -> Hardware:
    """Return the hardware with slower GPUs of the same memory, in the same network."""
    return replace(
        SLOWER,
        gpu_memory=hardware.gpu_memory,
        gpus_per_node=hardware.gpus_per_node,
        network=hardware.network,
    )
