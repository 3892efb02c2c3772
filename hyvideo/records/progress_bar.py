"""Progress of a run, its latest metrics and the time left: a bar in a terminal, plain lines
elsewhere.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TextIO

from tqdm import tqdm

from hyvideo.records.metric_table import console_texts

PLAIN_LINE_SECONDS = 30.0
# Text before the part of a stage; other stages are not shown.
STAGE_TEXTS = {
    "load": "loading",
    "videos": "reading",
    "conditions": "encoding",
    "rollout": "sampling",
    "decode": "decoding",
    "anchor": "anchor means,",
    "reward": "scoring",
    "update": "training,",
    "save": "saving",
    "validation": "validation:",
    "validation reward": "validation: scoring",
}


def console_text(metrics: dict[str, float]) -> str:
    """Format reward, KL and largest distance to the rollout policy, as far as known, and a long
    wait for rewards.
    """
    texts = [
        text.format(metrics[name])
        for name, text in console_texts().items()
        if not math.isnan(metrics.get(name, math.nan))  # a KL that is not measured
    ]
    waiting = metrics.get("time/reward", 0.0) / metrics.get("time/iteration", math.inf)
    if waiting > 0.25:
        texts.append(f"{waiting:.0%} of the time waiting for rewards")
    return ", ".join(texts)


def stage_bar(text: str, unit: str, *, is_shown: bool = True) -> Callable[[Iterable], Iterable]:
    """Return a function that shows a loop as a bar with the time left, removed at its end; only in
    a terminal.
    """
    return partial(tqdm, desc=text, unit=unit, leave=False, disable=None if is_shown else True)


class ProgressBar(AbstractContextManager):
    """Progress bar on stderr.

    Without a terminal, prints each stage of the first iteration, then a line every 30 s.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None, is_shown: bool = True):
        self.total = total
        self.is_shown = is_shown
        self.stream = sys.stderr if stream is None else stream
        # earliest time of the next line
        self.start = self.next_line = self.next_stage_line = time.monotonic()
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
        if stage == "load":  # each model has its own line
            key = (iteration, part)
        elif iteration == 0:
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

    def _line(self, text: str, now: float) -> None:
        print(f"{tqdm.format_interval(now - self.start)}  {text}", file=self.stream, flush=True)
        self.next_stage_line = now + PLAIN_LINE_SECONDS

    def __exit__(self, *exception) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(self.results, refresh=False)
            self.bar.close()
