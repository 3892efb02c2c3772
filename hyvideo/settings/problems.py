"""Problems of settings: sentences that name the setting, its value and the fix."""

from collections.abc import Callable, Iterable, Iterator

Problems = Iterator[str]


def problem_of(check: Callable, *arguments: object) -> Problems:
    """Yield the message of the ValueError that ``check(*arguments)`` raises, if any."""
    try:
        check(*arguments)
    except ValueError as error:
        yield str(error)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise ValueError with all problems, each once, if there are any."""
    message = "\n".join(dict.fromkeys(problems))
    if message:
        raise ValueError(message)
