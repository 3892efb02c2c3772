"""Trackers that show metrics during a run: TensorBoard, Weights & Biases (also with videos), and
those that accelerate supports.

Their packages are imported when a run uses them.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

from hyvideo.files.files import publish


class TensorBoardReport:
    """Scalars in an event file. A resumed run hides what was logged after its checkpoint."""

    errors = (OSError,)

    def __init__(
        self, output_dir: Path, *, run_name: str, config: dict, resume_iteration: int | None
    ):
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_iteration is None else resume_iteration + 1
        self.writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)
        settings = json.dumps({"run_name": run_name, **config}, indent=2, default=str)
        as_markdown_code = "\n".join(f"    {line}" for line in settings.splitlines())
        self.writer.add_text("config", as_markdown_code, max(0, resume_iteration or 0))

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, iteration)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbReport:
    """Scalars and mp4 files in Weights & Biases, with ``iteration`` as the horizontal axis.

    The project is ``WANDB_PROJECT`` or "sage-grpo". A resumed run keeps its id, so repeated
    iterations appear twice.
    """

    def __init__(
        self, output_dir: Path, *, run_name: str, config: dict, resume_iteration: int | None
    ):
        import wandb

        id_file = output_dir / "wandb" / "run_id"
        run_id = None
        if resume_iteration is not None and id_file.exists():
            run_id = id_file.read_text()
        self.wandb = wandb
        self.errors = (OSError, wandb.Error)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sage-grpo"),
            name=run_name,
            config=config,
            dir=str(output_dir),
            id=run_id,
            resume="allow" if run_id else None,
        )
        id_file.parent.mkdir(exist_ok=True)
        with publish(id_file) as temporary:
            temporary.write_text(self.run.id)
        # W&B's built-in step must increase with every call, which does not hold for videos and
        # resumed iterations.
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        self.run.log({**metrics, "iteration": iteration})

    def add_video(self, tag: str, file: Path, step: int) -> None:
        self.run.log({tag: self.wandb.Video(str(file), format="mp4"), "iteration": step})

    def close(self) -> None:
        self.run.finish()


# Trackers that accelerate starts, and the argument of each that names the run.
ACCELERATE = {"trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


class AccelerateReport:
    """Scalars in a tracker that accelerate supports, in the project "sage-grpo".

    A resumed run is a new run of the tracker.
    """

    errors = (Exception,)  # each package has its own, and no tracker may stop a run

    def __init__(self, package: str, *, run_name: str, config: dict):
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers write to accelerate's log, which needs it
        tracker_class = LOGGER_TYPE_TO_CLASS[package]
        self.tracker = tracker_class("sage-grpo", **{ACCELERATE[package]: run_name})
        self.tracker.start()
        self.tracker.store_init_configuration(config)

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        self.tracker.log(metrics, step=iteration)

    def close(self) -> None:
        self.tracker.finish()


Report = TensorBoardReport | WandbReport | AccelerateReport


def start_report(
    name: str, output_dir: Path, *, run_name: str, config: dict, resume_iteration: int | None
) -> Report:
    """Start the tracker with a name of ``report_to``."""
    if name in ACCELERATE:
        return AccelerateReport(name, run_name=run_name, config=config)
    report_class = {"tensorboard": TensorBoardReport, "wandb": WandbReport}[name]
    return report_class(
        output_dir, run_name=run_name, config=config, resume_iteration=resume_iteration
    )


def check_login(report_to: Collection[str]) -> None:
    """Raise ValueError if W&B is to be used and cannot be reached with a key, before any model is
    loaded. On a terminal, W&B asks for a missing key.
    """
    if "wandb" not in report_to:
        return
    import wandb

    try:
        if wandb.setup().settings.mode in ("offline", "disabled"):
            return
    except (wandb.Error, ValueError) as error:
        raise ValueError(
            "report_to has wandb, which rejects its settings: correct the environment variable "
            f"WANDB_... that it names ({error})"
        ) from error
    try:
        wandb.login()
    except wandb.Error as error:
        raise ValueError(
            f"report_to has wandb, which cannot log in: {error} Or set WANDB_MODE=offline to upload "
            "the run later, or remove wandb from report_to"
        ) from error
