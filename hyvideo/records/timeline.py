"""Timeline of an iteration: when each of its stages began and ended. Imports no torch."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hyvideo.files.files import optional
from hyvideo.records.run_files import write_json

TIMELINE_FILE = "timeline.json"


def write_timeline(
    output_dir: Path, iteration: int, start: float, spans: Iterable[tuple[str, Sequence[float]]]
) -> None:
    """Write timeline.json: the stages of an iteration that began at ``start``.

    ``spans``: stage, and its start and, once it has ended, its end. Those that ended before
    ``start`` are left out.
    """
    now = time.perf_counter()
    # a stage that has not ended yet lasts until now
    spans = [(stage, span if len(span) == 2 else (*span, now)) for stage, span in spans]
    relative = [
        [stage, *(round(max(0.0, t - start), 4) for t in span)]
        for stage, span in spans
        if span[1] > start
    ]
    with optional(TIMELINE_FILE):
        write_json(output_dir / TIMELINE_FILE, {"iteration": iteration, "spans": relative})
