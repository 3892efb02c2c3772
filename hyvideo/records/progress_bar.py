"""How far a run is, how it does and how long it still takes: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import AbstractContextManager
from typing import TextIO

from tqdm import tqdm

PLAIN_LINE_SECONDS = 30.0
CONSOLE_TEXTS = {  # by metric
    "reward/mean": "reward {:.4f}",
    "kl/position": "kl {:.1e}",
    "policy/ratio_max_deviation": "ratio off by {:.1e}",
}


def console_text(metrics: dict[str, float]) -> str:
    """One short line of reward, KL and the largest deviation of a ratio from 1, as far as they are there."""
    return " | ".join(text.format(metrics[name]) for name, text in CONSOLE_TEXTS.items() if name in metrics)


class ProgressBar(AbstractContextManager):
    """A bar on stderr. In a log file, where a bar cannot be read, plain lines: first, last and two a minute.

    Of the ``total`` iterations ``initial`` were done before the run was resumed.
    """

    def __init__(self, total: int, *, initial: int = 0, stream: TextIO | None = None):
        self.total, self.initial, self.iteration = total, initial, initial
        self.stream = sys.stderr if stream is None else stream
        self.start = self.next_line = time.monotonic()  # a plain line is due from then on
        form = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed} < {remaining}{postfix}"
        options = {"dynamic_ncols": True, "bar_format": form, "disable": not self.stream.isatty()}
        self.bar = tqdm(total=total, initial=initial, file=self.stream, **options)

    def update(self, metrics: dict[str, float]) -> None:
        """Shows that one more iteration is done."""
        self.iteration += 1
        self.bar.set_postfix_str(console_text(metrics), refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and (now >= self.next_line or self.iteration == self.total):
            print(self.plain_line(metrics, now - self.start), file=self.stream, flush=True)
            self.next_line = now + PLAIN_LINE_SECONDS

    def plain_line(self, metrics: dict[str, float], elapsed: float) -> str:
        """A line with the time left, from ``elapsed`` seconds since this process began to train."""
        per_iteration = elapsed / (self.iteration - self.initial)
        left = tqdm.format_interval(per_iteration * (self.total - self.iteration))
        parts = [f"iteration {self.iteration}/{self.total}", console_text(metrics)]
        return " | ".join([part for part in parts if part] + [f"{per_iteration:.2f} s each", f"{left} left"])

    def __exit__(self, *exception) -> None:
        self.bar.close()
