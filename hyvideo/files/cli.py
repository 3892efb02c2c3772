"""Command lines of the programs: the parser, and errors as one message."""

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hyvideo.files.text import nearest, quote, shorten

TRUTHS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of 120 columns that shows the defaults."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=120)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default if action.option_strings else None
        if default in (None, "", [], argparse.SUPPRESS) or default is False or not action.help:
            return action.help
        if isinstance(default, str | int | float | Path):
            words = str(default)
        else:
            words = " ".join(map(str, default))
        return f"{action.help} (default: {words.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """Argument parser whose ``--help`` shows defaults, and that suggests a flag instead of an
    unknown one. Error messages, which may quote a whole file, are shortened.
    """

    # flags of the program that another parser reads, for suggestions
    others: Sequence[str] = ()

    def __init__(self, description: str | None = None, **options):
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=_HelpFormatter, **options
        )
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")  # also -1e-5

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the value of an argument; an empty path is an error, such as that of an unset
        variable, because `Path` would take it for the current folder.
        """
        if action.type is Path and not arg_string.strip():
            raise argparse.ArgumentError(action, f"a path must not be empty, got {arg_string!r}")
        return super()._get_value(action, arg_string)

    def flags(self) -> list[str]:
        """Return the flags that ``--help`` shows, without itself."""
        return [
            flag
            for flag, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS and action.dest != "help"
        ]

    def error(self, message: str) -> NoReturn:
        message = re.sub(
            "argument (--[^:]+): expected (one|at least one) argument",
            r"\1 needs a value; write \1=VALUE if it starts with a dash",
            message,
        )
        unknown = re.match(r"unrecognized arguments: (--\S+)", message)
        hint = nearest(unknown[1], [*self.others, *self.flags()]) if unknown else ""
        if unknown and re.fullmatch(r"--local[-_]rank(=.*)?", unknown[1]):
            hint = "torch.distributed.launch gives this flag; start the program with torchrun"
        if hint:
            message = f"{message}; {hint}"
        message = shorten(message, 1_000)
        if self.usage is None:  # the generated one has a line for every few flags
            self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")
        super().error(message)


def truth(text: str) -> bool:
    """Return the truth value of ``true``, ``off`` etc.

    Raises argparse.ArgumentTypeError for other text.
    """
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"must be true or false, got {quote(text)}")
    return TRUTHS[text.lower()]


@contextmanager
def exit_on_error(
    program: str, errors: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Context manager or decorator that turns user errors into one message and exit code 2.

    These include OSError: a path that cannot be read or written, or a full disk.
    """
    try:
        yield
    except errors as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{quote(error.filename)}: {error.strerror}"
        print(f"{program}: {shorten(text)}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def exit_on_interrupt(program: str) -> Iterator[None]:
    """Context manager or decorator that turns Ctrl-C into one message and exit code 130, for a
    program that continues where it stopped.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted; the same command continues", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise SystemExit, so that ``finally`` blocks end
    the processes that the program has started.

    An ignored signal stays ignored, such as SIGHUP with nohup.
    """
    ends = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ends
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
