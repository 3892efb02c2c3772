"""Values of settings from the text of a flag or from YAML."""

import argparse
import json
from typing import Any, Literal, get_args, get_origin

from hyvideo.config.config import TRAITS, in_form, value_type
from hyvideo.config.declaration import TRUTHS, Switch
from hyvideo.data.text import nearest, quote


def value_of(name: str, text: str) -> Any:
    """Return the value of a setting, or an element of its list.

    Raises argparse.ArgumentTypeError for invalid text.
    """
    kind = value_type(name)
    if kind is Switch and text.lower() in TRUTHS:
        return in_form(name, TRUTHS[text.lower()])
    if choices := get_args(kind) if get_origin(kind) is Literal else TRAITS[name].choices:
        if text in choices or (kind is str and ".py:" in text):
            return text
        hint = nearest(text, choices)
        others = " or FILE.py:NAME" if kind is str else ""
        message = f"invalid choice: {quote(text)} (choose from {', '.join(choices)}{others})"
        raise argparse.ArgumentTypeError(f"{message}; {hint}" if hint else message)
    if kind is bool:
        return truth(text)
    number = int if kind is int else float if kind is float else str
    try:
        return number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"invalid {number.__name__} value: {quote(text)}"
        ) from error


def truth(text: str) -> bool:
    """Return the truth value of ``true``, ``off`` etc.

    Raises argparse.ArgumentTypeError for other text.
    """
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(
            f"invalid bool value: {quote(text)} (choose from true, false)"
        )
    return TRUTHS[text.lower()]


def value_of_yaml(name: str, value: object) -> Any:
    """Return the value of a setting. Raises TypeError for a YAML value of the wrong type."""
    kind = value_type(name)
    if get_origin(kind) is list:
        words = value if isinstance(value, list) else [value]
        if others := [word for word in words if not isinstance(word, str)]:
            raise TypeError(
                f"must be a list of strings, got the element {quote(others[0], 80)}; put it in "
                "quotes"
            )
        return words
    if isinstance(value, dict) and name in ("reward_weights", "reward_config"):
        return json.dumps(value)
    if not isinstance(value, (str, bool, int, float)):
        got = {list: "a list", dict: "a mapping", type(None): "nothing"}.get(
            type(value), type(value).__name__
        )
        raise TypeError(f"must be a single value, got {got}; remove the line to use the default")
    if isinstance(value, bool) and kind not in (bool, Switch):
        word = str(value).lower()
        raise TypeError(
            f"must not be a bool, got {word} (YAML reads yes, no, on and off as bools); put text "
            "in quotes"
        )
    if isinstance(value, float) and kind is int:
        raise TypeError(f"must be an integer, got {value:g}; write it without a point or exponent")
    return value_of(name, str(value))
