"""Values of settings from the text of a flag or from YAML."""

import argparse
import json
import re
from typing import Any, Literal, get_args, get_origin

from hyvideo.data.text import nearest, quote
from hyvideo.settings.config import Leaf, in_form
from hyvideo.settings.sections import Switch

TRUTHS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)


def value_of(leaf: Leaf, text: str) -> Any:
    """Return the value of a setting, or an element of its list.

    Raises argparse.ArgumentTypeError for invalid text.
    """
    kind = leaf.element
    if kind is Switch and text.lower() in TRUTHS:
        return str(TRUTHS[text.lower()]).lower()
    choices = get_args(kind) if get_origin(kind) is Literal else leaf.choices
    if choices:
        if text in choices or (kind is str and ".py:" in text):
            return text
        hint = nearest(text, choices)
        others = " or FILE.py:NAME" if kind is str else ""
        if others and text.endswith(".py"):
            hint = f"add the name of what the file defines: {text}:NAME"
        message = f"invalid choice: {quote(text)} (choose from {', '.join(choices)}{others})"
        raise argparse.ArgumentTypeError(f"{message}; {hint}" if hint else message)
    if kind is bool:
        return truth(text)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError as error:
        message = f"must be {'an integer' if kind is int else 'a number'}, got {quote(text)}"
        unit = re.fullmatch(r"([-+]?[0-9.]+) *([A-Za-z%]+)", text)
        if unit:
            message += f"; write {unit[1]}, without a unit"
        raise argparse.ArgumentTypeError(message) from error


def truth(text: str) -> bool:
    """Return the truth value of ``true``, ``off`` etc.

    Raises argparse.ArgumentTypeError for other text.
    """
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"must be true or false, got {quote(text)}")
    return TRUTHS[text.lower()]


def value_of_yaml(leaf: Leaf, value: object) -> Any:
    """Return the value of a setting. Raises TypeError for a YAML value of the wrong type."""
    if leaf.is_list:
        words = value if isinstance(value, list) else [value]
        others = [word for word in words if not isinstance(word, str)]
        if others:
            raise TypeError(
                f"must be a list of strings, got the element {quote(others[0], 80)}; put it in "
                "quotes"
            )
        return words
    if isinstance(value, dict) and leaf.name in ("reward_weights", "reward_config"):
        return json.dumps(value)
    if not isinstance(value, str | bool | int | float):
        names = {list: "a list", dict: "a mapping", type(None): "nothing"}
        got = names.get(type(value), type(value).__name__)
        fix = "remove the line to use the default" if value is None else "write one value"
        raise TypeError(f"must be a single value, got {got}; {fix}")
    if isinstance(value, bool) and leaf.kind not in (bool, Switch):
        word = str(value).lower()
        raise TypeError(
            f"must not be a bool, got {word} (YAML reads yes, no, on and off as bools); put text "
            "in quotes"
        )
    if isinstance(value, float) and leaf.kind is int:
        if value.is_integer():
            return int(value)
        raise TypeError(f"must be an integer, got {value:g}")
    return value_of(leaf, str(value))


def value_of_words(leaf: Leaf, words: list[str]) -> Any:
    """Return the value that the words after a flag stand for.

    Raises argparse.ArgumentTypeError for invalid words.
    """
    if leaf.is_list:
        return in_form(leaf.name, [value_of(leaf, word) for word in words])
    if len(words) != 1:
        raise argparse.ArgumentTypeError(f"takes one value, got {quote(' '.join(words))}")
    return value_of(leaf, words[0])
