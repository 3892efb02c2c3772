"""One flat dict of floats per iteration -> metrics.jsonl, TensorBoard, W&B and the console.

Names are stable and of the form ``group/name``, so that two runs can be laid over each other. Nothing here
knows of ranks: only the main process makes a writer or a progress bar.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TextIO

from PIL import Image
from torch import Tensor
from tqdm import tqdm

from hyvideo.data.videos import write_gif_bytes
from hyvideo.records.metrics_file import open_lines


def as_json_line(metrics: dict[str, float], iteration: int) -> str:
    """One line of strict JSON, the iteration first; NaN and inf, which JSON cannot say, become null.

    Raises ValueError where ``metrics`` names another iteration.
    """
    if metrics.get("iteration", iteration) != iteration:
        raise ValueError(f"metrics of iteration {metrics['iteration']} are logged at iteration {iteration}")
    record: dict[str, float | None] = {"iteration": iteration}
    for name, value in metrics.items():
        if name != "iteration":
            number = value if isinstance(value, int) else float(value)
            record[name] = number if math.isfinite(number) else None
    return json.dumps(record, allow_nan=False)


class TensorBoardReport:
    """Scalars, GIFs and pictures in an event file, in which a resumed run hides what was written later."""

    def __init__(self, output_dir: Path, *, run_name: str, config: dict, resume_iteration: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter  # here, as it is slow to import
        except ImportError as error:
            raise ValueError(
                'report_to has "tensorboard", which is not installed; '
                "pip install tensorboard or take it out of report_to"
            ) from error
        purge_step = None if resume_iteration is None else resume_iteration + 1
        self.writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)
        settings = json.dumps({"run_name": run_name, **config}, indent=2, default=str)
        as_markdown_code = "\n".join(f"    {line}" for line in settings.splitlines())
        self.writer.add_text("config", as_markdown_code, max(0, resume_iteration or 0))

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, iteration)
        self.writer.flush()

    def add_encoded_image(self, tag: str, encoded: bytes, step: int) -> None:
        """A picture file's bytes as they are. ``SummaryWriter.add_video`` would ask for moviepy."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = Image.open(io.BytesIO(encoded)).size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        self.writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
        self.writer.flush()

    def add_video(self, tag: str, video: Tensor, fps: float, step: int, *, file: Path | None) -> None:
        self.add_encoded_image(tag, write_gif_bytes(video, fps), step)

    def add_image_file(self, tag: str, file: Path, step: int) -> None:
        self.add_encoded_image(tag, file.read_bytes(), step)

    def close(self) -> None:
        self.writer.close()


class WandbReport:
    """The same under the same names at Weights & Biases, over the axis ``iteration``.

    The project is ``WANDB_PROJECT`` or "sage-grpo". A resumed run goes on under its old id; W&B keeps what
    the crashed run logged after the checkpoint, so the iterations done again are there twice.
    """

    def __init__(self, output_dir: Path, *, run_name: str, config: dict, resume_iteration: int | None):
        self.wandb = import_wandb()
        id_file = output_dir / "wandb" / "run_id"
        resumes = resume_iteration is not None and id_file.exists()
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sage-grpo"),
            name=run_name,
            config=config,
            dir=str(output_dir),
            id=id_file.read_text() if resumes else None,
            resume="allow" if resumes else None,
        )
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(self.run.id)
        # W&B's own step must grow with every call, which videos and resumed iterations would break.
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        self.run.log({**metrics, "iteration": iteration})

    def add_video(self, tag: str, video: Tensor, fps: float, step: int, *, file: Path | None) -> None:
        if file is None:
            raise ValueError(
                f"W&B shows videos from mp4 files, got no file for {tag}; write_video first and pass file="
            )
        self.run.log({tag: self.wandb.Video(str(file), format="mp4"), "iteration": step})

    def add_image_file(self, tag: str, file: Path, step: int) -> None:
        self.run.log({tag: self.wandb.Image(str(file)), "iteration": step})

    def close(self) -> None:
        self.run.finish()


def import_wandb():
    """The wandb module. Raises ValueError where it is not installed."""
    try:
        import wandb
    except ImportError:
        wandb = None
    # Where wandb is not installed, a folder ./wandb left by an earlier run is imported as an empty module.
    if not hasattr(wandb, "init"):
        raise ValueError('report_to has "wandb", which is not installed; pip install wandb or take it out of report_to')
    return wandb


REPORTS = {"tensorboard": TensorBoardReport, "wandb": WandbReport}


class MetricsWriter:
    """Writes the metrics of a run to ``output_dir``: always metrics.jsonl, and what ``report_to`` names.

    Args:
        report_to: any of "tensorboard" and "wandb".
        config: the resolved settings, kept with the run in TensorBoard and W&B.
        resume_iteration: the last finished iteration, whose successor is logged next; None for a new run, -1
            to start over in the same folder. Later lines of metrics.jsonl are dropped.

    Raises ValueError for an unknown or missing reporter, and for a new run in a folder that has the metrics
    of another.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        *,
        report_to: list[str],
        run_name: str,
        config: dict,
        resume_iteration: int | None,
    ):
        unknown = [name for name in report_to if name not in REPORTS]
        if unknown:
            raise ValueError(f"report_to takes {' and '.join(REPORTS)}, got {unknown}")
        if "wandb" in report_to:
            import_wandb()  # before anything is written
        output_dir = Path(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        self.last_iteration = resume_iteration
        self.lines = open_lines(output_dir / "metrics.jsonl", resume_iteration)
        self.reports = [
            REPORTS[name](output_dir, run_name=run_name, config=config, resume_iteration=resume_iteration)
            for name in dict.fromkeys(report_to)
        ]

    def log(self, metrics: dict[str, float], iteration: int) -> None:
        """The metrics of one iteration. Raises ValueError where it has been logged before."""
        if self.last_iteration is not None and iteration <= self.last_iteration:
            raise ValueError(f"iterations are logged once and in order: {iteration} after {self.last_iteration}")
        self.lines.write(as_json_line(metrics, iteration))
        self.last_iteration = iteration
        numbers = {name: float(value) for name, value in metrics.items() if name != "iteration"}
        self._to_reports(lambda report: report.log(numbers, iteration))

    def add_video(
        self, tag: str, video: Tensor, fps: float, step: int, *, file: str | os.PathLike | None = None
    ) -> None:
        """Shows a clip, uint8 (frames, 3, height, width), at an iteration.

        TensorBoard gets an animated GIF, W&B the mp4 ``file`` of the clip: ValueError without.
        """
        clip = None if file is None else Path(file)
        self._to_reports(lambda report: report.add_video(tag, video, fps, step, file=clip))

    def add_image_file(self, tag: str, file: str | os.PathLike, step: int) -> None:
        """Shows a picture file, such as the contact sheet of ``before_after``, at an iteration."""
        self._to_reports(lambda report: report.add_image_file(tag, Path(file), step))

    def close(self) -> None:
        self.lines.close()
        self._to_reports(lambda report: report.close())

    def _to_reports(self, tell: Callable) -> None:
        """One that cannot write, as its disk is full, is given up with a word: metrics.jsonl has it all."""
        for report in list(self.reports):
            try:
                tell(report)
            except OSError as error:
                self.reports.remove(report)
                name = type(report).__name__
                print(f"\n{name} GIVEN UP ({error}); training goes on", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


SHOWN = {  # metric -> how the console says it
    "reward/mean": "reward {:.4f}",
    "kl/position": "kl {:.1e}",
    "policy/ratio_max_deviation": "ratio off by {:.1e}",
}


def console_text(metrics: dict[str, float]) -> str:
    """Reward, KL and the largest deviation of a ratio from 1, as far as they are there, in one short line."""
    return " | ".join(text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics)


class ProgressBar:
    """How far the run is, how it does and how long it still takes, on stderr.

    In a terminal a bar. Elsewhere plain lines, the first, the last and one every ``every_seconds``, as a log
    file of carriage returns cannot be read.

    Args:
        total: iterations of the whole run; ``initial`` of them were done before it was resumed.
    """

    def __init__(self, total: int, *, initial: int = 0, every_seconds: float = 30.0, stream: TextIO | None = None):
        self.total, self.initial, self.iteration = total, initial, initial
        self.stream = sys.stderr if stream is None else stream
        self.every_seconds = every_seconds
        self.start = time.monotonic()
        self.last_line: float | None = None  # when the last plain line was printed
        self.bar = self.make_bar() if self.stream.isatty() else None

    def make_bar(self) -> tqdm:
        return tqdm(
            total=self.total,
            initial=self.initial,
            file=self.stream,
            dynamic_ncols=True,
            bar_format="{n_fmt}/{total_fmt} |{bar:20}| {elapsed} < {remaining}{postfix}",
        )

    def update(self, metrics: dict[str, float]) -> None:
        """One iteration more is done."""
        self.iteration += 1
        if self.bar is not None:
            self.bar.set_postfix_str(console_text(metrics), refresh=False)
            self.bar.update()
            return
        now = time.monotonic()
        is_due = self.last_line is None or now - self.last_line >= self.every_seconds
        if is_due or self.iteration == self.total:
            print(self.plain_line(metrics, now - self.start), file=self.stream, flush=True)
            self.last_line = now

    def plain_line(self, metrics: dict[str, float], elapsed: float) -> str:
        """``elapsed``: seconds since this process began to train, from which the time left is told."""
        per_iteration = elapsed / (self.iteration - self.initial)
        left = tqdm.format_interval(per_iteration * (self.total - self.iteration))
        parts = [f"iteration {self.iteration}/{self.total}", console_text(metrics)]
        return " | ".join([part for part in parts if part] + [f"{per_iteration:.2f} s each", f"{left} left"])

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
