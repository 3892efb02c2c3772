"""Length of the whole run before it begins: hours where a GPU's rate can be predicted, else transformer forwards."""

import math
from dataclasses import dataclass
from pathlib import Path

from hyvideo.config.memory.cost import cost, duration, validation_seconds
from hyvideo.config.memory.disk import checkpoint_lines
from hyvideo.config.memory.hardware import Hardware
from hyvideo.config.memory.phases import memory, settled
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.run_plan import labelled
from hyvideo.config.sections import RecordSettings
from hyvideo.config.settings import Config
from hyvideo.data.prompts import read_requests
from hyvideo.data.templates import fill
from hyvideo.models.sizes import read_architecture


@dataclass(frozen=True)
class WholeRun:
    """Iterations and validations of a run, and the seconds of each."""

    iterations: int
    iteration_seconds: float
    validations: int
    validation_videos: int
    validation_seconds: float
    num_gpus: int
    forwards: float  # transformer evaluations of all of it, a training forward-backward counted as 3 to 4

    @property
    def seconds(self) -> float:
        return self.iterations * self.iteration_seconds + self.validations * self.validation_seconds

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.seconds / 3600


def whole_run(run: PlannedRun) -> WholeRun:
    """Length of a run. Raises ValueError for validation prompts that cannot be read."""
    settings, videos, validations = run.settings, 0, 0
    if run.validation:
        videos = len(read_requests(*settings.valid_video_csv)) * settings.validation_repeats
        validations = num_validations(run.config.record, settings.max_steps)
    spent = cost(run)
    of_video = settings.validation_steps * (run.validation or run).plan.sampled_branches
    return WholeRun(
        iterations=settings.max_steps,
        iteration_seconds=duration(run).total,
        validations=validations,
        validation_videos=videos,
        validation_seconds=validation_seconds(run, videos),
        num_gpus=run.world_size,
        forwards=settings.max_steps * spent.rollouts * spent.forwards_per_rollout + validations * videos * of_video,
    )


def num_validations(record: RecordSettings, max_steps: int) -> int:
    """Validations of a whole run: before the first iteration, at every interval, and after the last iteration."""
    return record.validate_at_step0 + math.ceil(max_steps / record.validation_interval)


def start_lines(config: Config, world_size: int, device: str, gpu_memory: float = Hardware.gpu_memory) -> list[str]:
    """Lines about the forwards, the recomputation, the length and the checkpoints of a run, for its start.

    Empty for a transformer that is not there and was never released, and for validation prompts that are not there:
    what is wrong with them is told when they are read. ``device`` may be ``auto`` still; ``gpu_memory`` is in GiB.
    """
    try:
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        run = PlannedRun(config, world_size, architecture, hardware=Hardware(gpu_memory=gpu_memory))
        run = run.with_settings(device=device)
        forwards = [f"{cost(run).forwards_per_rollout:.4g} transformer evaluations"]
        recomputation = labelled("recomputation", recomputation_lines(run))
        lines = [*labelled("forwards per rollout", forwards), *recomputation, *length_lines(run)]
        return lines + checkpoint_lines(run)
    except ValueError:
        return []


def recomputation_lines(run: PlannedRun) -> list[str]:
    """A line that says what a GPU recomputes in the backward pass, with the GiB that a rank needs; none on a CPU."""
    if run.config.model.device == "cpu" or run.checkpointing == "none":
        return []
    chosen, selective = settled(run), run.with_settings(activation_checkpointing="selective")
    line = f"{chosen.checkpointing}: {memory(chosen).needed_gib:.1f} of {run.hardware.gpu_memory:.4g} GiB"
    if chosen.checkpointing == "full":
        line += f"; selective, which is faster, needs {memory(selective).needed_gib:.1f}"
    return [line]


def length_lines(run: PlannedRun) -> list[str]:
    """Lines about the length of a run: GPU-hours of a released model, else forwards; a warning if it is over a week."""
    return fill(
        Path(__file__).with_name("length.txt.jinja"),
        run=run,
        usual_rate=Hardware.rate,
        length=whole_run(run),
        rollouts=cost(run).rollouts,
        waiting=duration(run).waiting,
    ).splitlines()
