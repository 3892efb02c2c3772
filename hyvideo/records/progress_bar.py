"""How far a run is, how it does and how long it still takes: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from typing import Self, TextIO

from tqdm import tqdm

CONSOLE_TEXTS = {  # by metric
    "reward/mean": "reward {:.4f}",
    "kl/position": "kl {:.1e}",
    "policy/ratio_max_deviation": "ratio off by {:.1e}",
}


def console_text(metrics: dict[str, float]) -> str:
    """One short line of reward, KL and the largest deviation of a ratio from 1, as far as they are there."""
    return " | ".join(text.format(metrics[name]) for name, text in CONSOLE_TEXTS.items() if name in metrics)


class ProgressBar:
    """A bar on stderr. Outside a terminal plain lines, the first, the last and one every ``every_seconds``.

    A log file of carriage returns cannot be read.

    Args:
        total: Iterations of the whole run; ``initial`` of them were done before it was resumed.
    """

    def __init__(self, total: int, *, initial: int = 0, every_seconds: float = 30.0, stream: TextIO | None = None):
        self.total, self.initial, self.iteration = total, initial, initial
        self.stream = sys.stderr if stream is None else stream
        self.every_seconds = every_seconds
        self.start = time.monotonic()
        self.last_line: float | None = None  # when the last plain line was printed
        self.bar: tqdm | None = None
        if self.stream.isatty():
            form = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed} < {remaining}{postfix}"
            self.bar = tqdm(total=total, initial=initial, file=self.stream, dynamic_ncols=True, bar_format=form)

    def update(self, metrics: dict[str, float]) -> None:
        """Shows that one more iteration is done."""
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
        """A line with the time left, from ``elapsed`` seconds since this process began to train."""
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
