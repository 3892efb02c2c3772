"""One flat dict of floats per iteration -> metrics.jsonl, TensorBoard and W&B.

Names are stable and of the form ``group/name``, so that two runs can be laid over each other. Nothing here
knows of ranks: only the main process makes a writer.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from torch import Tensor

from hyvideo.records.metrics_file import open_lines
from hyvideo.records.trackers import REPORTS, import_wandb


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


class MetricsWriter:
    """Writes the metrics of a run to ``output_dir``: always metrics.jsonl, and what ``report_to`` names.

    Args:
        report_to: Any of "tensorboard" and "wandb".
        config: The resolved settings, kept with the run in TensorBoard and W&B.
        resume_iteration: The last finished iteration, whose successor is logged next; None for a new run, -1
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
        config: Mapping[str, object],
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
        """Writes the metrics of one iteration. Raises ValueError where it has been logged before."""
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

    def _to_reports(self, call: Callable) -> None:
        """Makes the ``call`` for each report; one whose disk is full is given up with a word."""
        for report in list(self.reports):
            try:
                call(report)
            except OSError as error:
                self.reports.remove(report)
                name = type(report).__name__
                print(f"\n{name} GIVEN UP ({error}); training goes on", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
