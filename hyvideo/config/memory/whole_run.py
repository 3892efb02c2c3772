"""Predicted length of the whole run: hours if the rate of the GPU can be predicted, else forward passes."""

from dataclasses import dataclass, replace
from pathlib import Path

from hyvideo.config.memory.cost import COMPILATION, duration, forwards_per_rollout, validation_seconds
from hyvideo.config.memory.disk import checkpoint_bytes, disk_bytes, max_checkpoints, num_saves, rank_checkpoint_bytes
from hyvideo.config.memory.hardware import SLOWER, Hardware, gpu_rates, hardware_of
from hyvideo.config.memory.overheads import pageable_seconds
from hyvideo.config.memory.persistent import pinned_bytes
from hyvideo.config.memory.phases import GIB, memory, resolve_auto
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.run_inputs import RunInputs
from hyvideo.data.templates import fill

MAX_VALIDATION_SHARE = 0.2  # of a run's time, above which the plan warns


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
        computing = self.iterations * self.iteration_seconds + self.validations * self.validation_seconds
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
        forwards=settings.max_steps * run.plan.rollouts * forwards_per_rollout(run) + validations * videos * per_video,
    )


def start_lines(
    inputs: RunInputs, device: str, gpu_memory: float = Hardware.gpu_memory, device_name: str = ""
) -> list[str]:
    """Return lines on cost, checkpointing, length and checkpoints of a run; empty if a file for them is missing.

    ``device_name`` is torch's name of the GPU; an unknown one counts as an H100.
    """
    known = hardware_of(device_name) if gpu_rates(device_name)[1] else Hardware()
    try:
        run = PlannedRun(
            config=inputs.config.with_settings(device=device),
            world_size=inputs.world_size,
            architecture=inputs.architecture,
            hardware=replace(known, gpu_memory=gpu_memory),
            files=inputs.files,
        )
        runs = {"chosen": resolve_auto(run), "selective": run.with_settings(activation_checkpointing="selective")}
        template, forwards = Path(__file__).with_name("start.txt.jinja"), forwards_per_rollout(run)
        return fill(template, run=run, forwards=forwards, memory=memory, **runs).splitlines() + length_lines(run)
    except ValueError:
        return []


def slower_hardware(hardware: Hardware) -> Hardware:
    """Return the hardware with slower GPUs of the same memory, in the same network."""
    return replace(
        SLOWER, gpu_memory=hardware.gpu_memory, gpus_per_node=hardware.gpus_per_node, network=hardware.network
    )


def length_lines(run: PlannedRun) -> list[str]:
    """Return lines on the length of a run, its disk space and host memory: hours of a released model on GPUs, else
    forward passes."""
    num_local = min(run.world_size, run.hardware.gpus_per_node)
    return fill(
        Path(__file__).with_name("length.txt.jinja"),
        run=run,
        is_usual=run.hardware.name == "H100",
        slower_rate=SLOWER.rate,
        slower=whole_run(replace(run, hardware=slower_hardware(run.hardware))).seconds / 86400,
        length=whole_run(run),
        waiting=duration(run).waiting,
        checkpoint_gib=checkpoint_bytes(run) / GIB,
        pinned={item: num_local * size / GIB for item, size in pinned_bytes(run).items()},
        copy_gib=min(num_local, run.num_shards) * rank_checkpoint_bytes(run) / GIB,
        max_checkpoints=max_checkpoints(run),
        disk={kind: size / GIB for kind, size in disk_bytes(run).items()},
        max_share=MAX_VALIDATION_SHARE,
    ).splitlines()
