"""Progress of a run on the console, as a bar or as few lines."""

import contextlib
import io
import os
import termios

import pytest

from hyvideo.records.progress_bar import ProgressBar

METRICS = {
    "reward/mean": 0.8123,
    "kl/position": 1.23e-5,
    "policy/ratio_max_deviation": 3e-7,
    "lr": 1e-5,
}


def clock(monkeypatch, seconds_per_call: float) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(
        "hyvideo.records.progress_bar.time.monotonic", lambda: seconds_per_call * next(ticks)
    )


def shown_in_a_terminal(rows: int, columns: int, total: int, iterations: range) -> str:
    """Return the output of a run in a terminal of that size."""
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, (rows, columns))
    with (
        os.fdopen(writer, "w") as stream,
        ProgressBar(total, stream=stream).begin(iterations[0] - 1) as bar,
    ):
        train(bar, iterations)
    parts = []
    with contextlib.suppress(OSError):  # raised at the end of the output
        while True:
            parts.append(os.read(reader, 4096))
    os.close(reader)
    return b"".join(parts).decode()


def train(bar: ProgressBar, iterations: range) -> None:
    """Report the stages of a run: base validation, then iterations with one sampled and one trained
    batch.
    """
    for step in range(1, 4):
        bar.stage("validation", 0, f"sampling batch 1/1, step {step}/3")
    for iteration in iterations:
        bar.stage("rollout", iteration, "batch 1/1")
        bar.stage("after rollout", iteration)
        bar.stage("update", iteration)  # only its parts are shown
        bar.stage("update", iteration, "pass 1/2 of update 1")
        bar.update(METRICS)


def test_without_a_terminal_fast_iterations_do_not_flood_the_log(monkeypatch):
    clock(monkeypatch, 1.0)
    stream = io.StringIO()
    with ProgressBar(100, stream=stream).begin() as bar:
        for _ in range(100):
            bar.update({})
    shown = [line.split()[2] for line in stream.getvalue().splitlines()]
    assert shown == [f"{count}/100" for count in (1, 31, 61, 91, 100)]


def test_other_ranks_print_nothing():
    stream = io.StringIO()
    with ProgressBar(2, stream=stream, is_shown=False).begin() as bar:
        bar.stage("rollout", 1, "batch 1/1")
    assert not stream.getvalue()


@pytest.mark.parametrize("columns", [0, 20])
def test_narrow_terminals_show_progress(columns):
    text = shown_in_a_terminal(24, columns, 2, range(1, 3))
    if columns:
        assert "| " in text and all(len(picture) < columns for picture in text.rstrip().split("\r"))
    else:
        assert "base validation" in text and "iteration 2/2 done" in text
