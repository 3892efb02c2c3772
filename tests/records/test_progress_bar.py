"""Progress of a run on the console, as a bar or as few lines."""

import io

from hyvideo.records.progress_bar import ProgressBar


def clock(monkeypatch, seconds_per_call: float) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(
        "hyvideo.records.progress_bar.time.monotonic", lambda: seconds_per_call * next(ticks)
    )


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
