"""Writer of metrics: one flat dict of floats, ``group/name``, per iteration -> metrics.jsonl
and the trackers. Beside them, audit.jsonl has what an audit of the run needs.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hyvideo.files.files import optional
from hyvideo.records.metrics_file import Lines
from hyvideo.records.run_files import or_none
from hyvideo.records.trackers import Report, start_report


class MetricsWriter(AbstractContextManager):
    """Writes the metrics of a run to metrics.jsonl in ``output_dir`` and to the trackers in
    ``report_to``.

    ``resume_iteration`` is the last finished iteration, None for a new run, or -1 to start over in
    the same folder; ``audited_iteration`` is that of audit.jsonl, which has an iteration's line
    before its checkpoint.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        report_to: list[str],
        run_name: str,
        config: dict,
        resume_iteration: int | None,
        audited_iteration: int | None = None,
    ):
        output_dir.mkdir(parents=True, exist_ok=True)
        self._audited_iteration = audited_iteration
        self._audit: Lines | None = None  # opened with the first line
        self._audit_file = output_dir / "audit.jsonl"
        self.lines = Lines(output_dir / "metrics.jsonl", resume_iteration)
        self.reports: dict[str, Report] = {
            name: start_report(
                name,
                output_dir,
                run_name=run_name,
                config=config,
                resume_iteration=resume_iteration,
            )
            for name in report_to
        }

    def log(self, metrics: dict[str, float | list], iteration: int) -> None:
        """Write the metrics of one iteration; NaN and inf become null in JSON, lists go to
        metrics.jsonl only.
        """
        single = {name: value for name, value in metrics.items() if not isinstance(value, list)}
        known = dict(metrics)
        for name, value in single.items():
            if not isinstance(value, int):
                known[name] = or_none(float(value))
        self.lines.write(json.dumps({"iteration": iteration} | known, allow_nan=False))
        numbers = {name: float(value) for name, value in single.items() if name != "iteration"}
        self._to_reports(lambda report: report.log(numbers, iteration))

    def log_audit(self, line: dict) -> None:
        """Write a line of audit.jsonl (`training.ledger`)."""
        if self._audit is None:
            self._audit = Lines(self._audit_file, self._audited_iteration)
        self._audit.write(json.dumps(line, allow_nan=False))

    def add_video(self, tag: str, file: Path, step: int) -> None:
        """Log an mp4 file at iteration ``step``, in the trackers that show videos."""
        self._to_reports(
            lambda report: hasattr(report, "add_video") and report.add_video(tag, file, step)
        )

    def close(self) -> None:
        self.lines.close()
        if self._audit:
            self._audit.close()
        self._to_reports(lambda report: report.close())

    def _to_reports(self, call: Callable) -> None:
        """Call ``call`` with each tracker; one that fails, for example because the disk is full, is
        not used any more.
        """
        for name, report in list(self.reports.items()):
            with optional(name, report.errors) as problems:
                call(report)
            if problems:
                del self.reports[name]

    def __exit__(self, *exception) -> None:
        self.close()
