"""Progress of a run, its latest metrics and the time left: a bar in a terminal, plain lines
elsewhere. The clock of all lines starts with the process.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TextIO

from tqdm import tqdm

from hyvideo.files.clock import STARTED
from hyvideo.files.text import counted, note
from hyvideo.records.metric_table import console_texts

PLAIN_LINE_SECONDS = 30.0  # between the lines of a program, which may take days
START_LINE_SECONDS = 10.0  # until the first iteration or the first part of a loop is done
# Text before the part of a stage; other stages are not shown.
STAGE_TEXTS = {
    "check": "checking",
    "load": "loading",
    "videos": "reading",
    "conditions": "encoding",
    "rollout": "sampling",
    "decode": "decoding",
    "anchor": "velocities of the anchor,",
    "reward": "scoring",
    "update": "training,",
    "save": "saving",
    "validation": "validation:",
    "validation reward": "validation: scoring",
}


def console_text(metrics: dict[str, float]) -> str:
    """Format reward, KL and largest distance to the rollout policy, as far as known, else the loss;
    and a long wait for rewards.
    """
    texts = [
        text.format(metrics[name])
        for name, text in console_texts().items()
        if not math.isnan(metrics.get(name, math.nan))  # a KL that is not measured
    ]
    if not texts and "loss/total" in metrics:
        texts = [f"loss {metrics['loss/total']:.4f}"]
    waiting = metrics.get("time/reward", 0.0) / metrics.get("time/iteration", math.inf)
    if waiting > 0.25:
        texts.append(f"{waiting:.0%} of the time waiting for rewards")
    return ", ".join(texts)


def print_stage(text: str) -> None:
    """Print what a program does next, with the time since its start; only on the first rank."""
    note(f"{tqdm.format_interval(time.monotonic() - STARTED)}  {text}")


def stage_bar(text: str, unit: str, *, is_shown: bool = True) -> Callable[[Iterable], Iterable]:
    """Return a function that shows a loop and the time left: as a bar in a terminal, removed at its
    end, and elsewhere as a line every 30 s.
    """
    if is_shown and not sys.stderr.isatty():
        return partial(_with_lines, text=text, unit=unit)
    return partial(tqdm, desc=text, unit=unit, leave=False, disable=not is_shown)


def _with_lines(parts: Sequence, *, text: str, unit: str) -> Iterator:
    """Yield the parts of a loop, and print every 30 s how many are done and the time left."""
    start = printed = time.monotonic()
    for done, part in enumerate(parts):
        now = time.monotonic()
        if now - printed >= PLAIN_LINE_SECONDS:
            left = tqdm.format_interval((now - start) / done * (len(parts) - done))
            print_stage(f"{text}, {done} of {counted(len(parts), unit)} done, {left} left")
            printed = now
        yield part


class ProgressBar(AbstractContextManager):
    """Progress bar on stderr.

    Without a terminal, prints each stage of the first iteration and a line every 10 s, then a line
    every 30 s.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None, is_shown: bool = True):
        self.total = total
        self.is_shown = is_shown
        self.stream = sys.stderr if stream is None else stream
        self.start = time.monotonic()
        self.next_line = self.next_stage_line = self.start  # earliest time of the next line
        self.initial = 0
        self.iteration = 0
        self.training_since = None
        self.bar = None
        self.results = ""
        self.reported = set()

    def begin(self, initial: int = 0) -> "ProgressBar":
        """Start after ``initial`` iterations (0 for a new run); open the bar if the terminal
        reports its size.
        """
        self.initial = self.iteration = initial
        if (
            self.is_shown
            and self.stream.isatty()
            and all(os.get_terminal_size(self.stream.fileno()))
        ):
            self.bar = tqdm(
                total=self.total,
                initial=initial,
                file=self.stream,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar:10}| {elapsed}{postfix}",
            )
        return self

    def stage(self, stage: str, iteration: int, part: str = "") -> None:
        """Show the current stage and the ``part`` of it, such as a batch or a step."""
        text = STAGE_TEXTS.get(stage, "")
        now = time.monotonic()
        if not (self.is_shown and text and part):
            return
        if iteration > self.initial and self.training_since is None:
            self.training_since = now
        text = f"{text} {part}"
        key = (iteration, stage)
        if stage in ("check", "load"):  # each part has its own line
            key = (iteration, part)
        elif iteration == 0 and stage.startswith("validation"):
            text = f"base {text}"
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(filter(None, [text, self.results])))
        elif now >= self.next_stage_line or (
            self.iteration == self.initial and key not in self.reported
        ):
            self.reported.add(key)
            if iteration:
                text = f"iteration {iteration}/{self.total}, {text}"
            self._line(text, now)

    def update(self, metrics: dict[str, float]) -> None:
        """Show that one more iteration is done, and the time left at the mean speed of this
        process.
        """
        self.iteration += 1
        now = time.monotonic()
        count = self.iteration - self.initial
        each = (now - (self.training_since or self.start)) / count
        left = tqdm.format_interval(each * (self.total - self.iteration))
        self.results = ", ".join(filter(None, [f"{left} left", console_text(metrics)]))
        if self.bar is not None:
            self.bar.set_postfix_str(self.results, refresh=False)
            self.bar.update()
        elif now >= self.next_line or count == 1 or self.iteration == self.total:
            self._line(
                f"iteration {self.iteration}/{self.total} done, {each:.2f} s each, {self.results}",
                now,
            )
            self.next_line = now + PLAIN_LINE_SECONDS

    def say(self, text: str) -> None:
        """Print a line, in a terminal above the bar."""
        if self.is_shown:
            clock = tqdm.format_interval(time.monotonic() - STARTED)
            tqdm.write(f"{clock}  {text}", file=self.stream)

    def _line(self, text: str, now: float) -> None:
        print(f"{tqdm.format_interval(now - STARTED)}  {text}", file=self.stream, flush=True)
        starts = self.iteration == self.initial
        self.next_stage_line = now + (START_LINE_SECONDS if starts else PLAIN_LINE_SECONDS)

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(self.results, refresh=False)
            self.bar.close()
