"""The console shows how a run does, as a bar or in few lines."""

import io

from hyvideo.records.progress_bar import ProgressBar, console_text

ROUND = {"reward/mean": 0.8123, "kl/position": 1.23e-5, "policy/ratio_max_deviation": 3e-7, "lr": 1e-5}


def test_the_console_shows_reward_kl_and_ratio_and_leaves_out_what_is_not_measured():
    assert console_text(ROUND) == "reward 0.8123 | kl 1.2e-05 | ratio off by 3.0e-07"
    assert console_text({"reward/mean": float("nan"), "lr": 1.0}) == "reward nan"


def clock(monkeypatch, seconds_per_call: float) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr("hyvideo.records.progress_bar.time.monotonic", lambda: seconds_per_call * next(ticks))


def test_without_a_terminal_plain_lines_tell_the_time_left(monkeypatch):
    clock(monkeypatch, 60.0)
    stream = io.StringIO()
    with ProgressBar(14, initial=10, stream=stream) as bar:
        for _ in range(4):
            bar.update(ROUND)
    text = stream.getvalue()
    assert "\r" not in text and len(text.splitlines()) == 4
    assert text.splitlines()[0] == (
        "iteration 11/14 | reward 0.8123 | kl 1.2e-05 | ratio off by 3.0e-07 | 60.00 s each | 03:00 left"
    )
    assert text.splitlines()[-1].endswith("00:00 left")


def test_without_a_terminal_fast_iterations_do_not_flood_the_log(monkeypatch):
    clock(monkeypatch, 1.0)
    stream = io.StringIO()
    with ProgressBar(100, stream=stream) as bar:
        for _ in range(100):
            bar.update({})
    shown = [line.split(" | ")[0] for line in stream.getvalue().splitlines()]
    assert shown == [f"iteration {count}/100" for count in (1, 31, 61, 91, 100)]


def test_in_a_terminal_there_is_one_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with ProgressBar(14, initial=10, stream=stream) as bar:
        for _ in range(4):
            bar.update(ROUND)
    assert "\r" in stream.getvalue() and stream.getvalue().count("\n") == 1
    last = stream.getvalue().rstrip("\n").split("\r")[-1]
    assert last.startswith("14/14 |") and "reward 0.8123 | kl 1.2e-05 | ratio off by 3.0e-07" in last
