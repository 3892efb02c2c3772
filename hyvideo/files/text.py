"""Text for people: rows of a label and a text, which one printer aligns, and the forms of numbers
in them.
"""

import difflib
import functools
import os
import sys
from collections.abc import Iterable, Sequence

Row = tuple[str, str]  # label and text; an empty label continues the row above

LABEL_WIDTH = 23


def lines_of(rows: Iterable[Row], width: int = LABEL_WIDTH) -> list[str]:
    """Return a line for each row, with the texts aligned."""
    return [f"{label:<{width}}{text}" for label, text in rows]


def labelled(label: str, texts: Iterable[str]) -> list[Row]:
    """Return a row for each text, with the label at the first one only."""
    return [("" if number else label, text) for number, text in enumerate(texts)]


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 100 on; also a
    template filter.
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1: ``1,200 videos``."""
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"


def quote(text: object, longest: int = 200) -> str:
    """Return ``text`` in quotes for a message: truncated, with escapes for characters that cannot
    be printed.
    """
    text = str(text)
    if len(text) > longest:
        text = f"{text[:longest]}..."
    return repr(text)


@functools.cache
def note(message: str) -> None:
    """Print a message once, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def shorten(message: str, longest: int = 4_000) -> str:
    """Return a message without its middle if it has more than ``longest`` characters."""
    if len(message) <= longest:
        return message
    return f"{message[: longest // 2]} ... {message[-longest // 2 :]}"


def describe_error(error: BaseException) -> str:
    """Return the type, text and notes of an exception, shortened."""
    notes = getattr(error, "__notes__", ())
    return shorten("; ".join([f"{type(error).__name__}: {error}", *notes]))


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line of text per row, with the cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


# What settings are called elsewhere; of several, the first that a program has is meant.
_SYNONYMS = {
    "lr": ("learning_rate",),
    "steps": ("num_inference_steps", "grpo_sampling_steps", "validation_steps"),
    "num_steps": ("num_inference_steps", "max_steps"),
    "num_frames": ("video_length", "sample_n_frames"),
    "checkpoint": ("checkpoint_path", "resume_from_checkpoint"),
    "ckpt": ("checkpoint_path", "resume_from_checkpoint"),
    "resume": ("resume_from_checkpoint", "checkpoint_path"),
    "model": ("pretrained_model_root", "transformer_version"),
    "model_name": ("transformer_version",),
    "model_path": ("pretrained_model_root",),
    "pretrained_model_name_or_path": ("pretrained_model_root",),
    "epochs": ("max_steps",),
    "num_epochs": ("max_steps",),
    "num_train_epochs": ("max_steps",),
    "max_train_steps": ("max_steps",),
    "iterations": ("max_steps",),
    "train_batch_size": ("batch_size",),
    "prompts": ("prompts_csv", "valid_video_csv", "prompt"),
    "guidance": ("guidance_scale", "cfg_scale"),
    "output": ("output_path", "output_dir"),
}


def nearest(word: str, names: Iterable[str]) -> str:
    """Return ``did you mean NAME?`` for the name that a word stands for, in any case: by its name
    elsewhere, by its beginning, or by its spelling; empty if there is none.
    """
    wanted = _plain(word[:100].partition("=")[0])
    by_plain = {_plain(name): name for name in names}
    known = [name for name in _SYNONYMS.get(wanted, ()) if name in by_plain]
    longer = sorted((name for name in by_plain if name.startswith(wanted)), key=len)
    shorter = sorted((name for name in by_plain if wanted.startswith(name)), key=len, reverse=True)
    begins = [name for name in (*longer, *shorter) if min(len(name), len(wanted)) > 2]
    near = known or begins or difflib.get_close_matches(wanted, by_plain, n=1)
    return f"did you mean {by_plain[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
