"""Scores in a choice of a chat completion, by kind of answer.

Invalid answers raise one of ``MALFORMED``.

    grades    JSON with a whole number from 1 to 5 for each dimension:  sum_k k p_k / sum_k p_k,  p_k: P(digit k)
    text      one line "NAME Score (1-5): NUMBER" for each dimension, as UnifiedReward-2.0 answers
    labelled  "LABEL ...: DIGIT" for each dimension, as VideoScore2 answers:  sum_k k p_k / sum_k p_k
    yes_no    one word:  P(yes) / (P(yes) + P(no))

Without probabilities the score is the stated grade, or 1 for yes and 0 for no.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

from hyvideo.rewards.chat_endpoint import answer_text
from hyvideo.rewards.rewards import Scores

GRADES = {str(k): float(k) for k in range(1, 6)}
YES_OR_NO = {"no": 0.0, "yes": 1.0}


def grades(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the expected grade of each dimension, the stated one without probabilities."""
    message = choice["message"]
    text = answer_text(choice).removeprefix("```json").strip("`\n ")
    is_object = text.startswith("{") and text.endswith("}")
    stated = json.loads(text) if is_object else {}
    if set(stated) != set(dimensions) or not all(
        type(k) is int and 1 <= k <= 5 for k in stated.values()
    ):
        raise ValueError(
            f"an answer must have grades from 1 to 5 for exactly {', '.join(dimensions)}, got "
            f"{message!r}"
        )
    tokens = (choice.get("logprobs") or {}).get("content") or []
    digits = [token for token in tokens if re.fullmatch(r"\s*[1-5]\s*", token["token"])]
    if [int(token["token"]) for token in digits] != list(stated.values()):
        digits = [{}] * len(stated)  # the tokens do not match the grades
    scores = {}
    for (name, grade), token in zip(stated.items(), digits):
        mean, total = _expected(token, GRADES)
        scores[name] = mean if total > 0 else float(grade)
    return scores


def text_scores(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the scores that are written in the answer, each dimension once."""
    text = answer_text(choice)
    # The number ends its line, perhaps as 4/5: otherwise "3,5", "3-4" and "4/10" would be read as
    # 3, 3 and 4.
    line = rf"({'|'.join(dimensions)}) Score \(1-5\):\s*([-+]?\d+(?:\.\d+)?)(?:[ \t]*/[ \t]*5)?\.?[ \t\r]*$"
    found = re.findall(line, text, re.MULTILINE)
    scores = {name: float(number) for name, number in found}
    if sorted(name for name, _ in found) != sorted(dimensions) or not all(
        1 <= k <= 5 for k in scores.values()
    ):
        raise ValueError(
            f"an answer must have one score from 1 to 5 for {', '.join(dimensions)}, got {text!r}"
        )
    return scores


def yes_probability(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the probability of yes among yes and no."""
    (name,) = dimensions
    tokens = (choice.get("logprobs") or {}).get("content")
    if tokens and tokens[0].get("top_logprobs"):
        mean, total = _expected(tokens[0], YES_OR_NO)
        if not total > 0:
            raise ValueError(f"an answer must be yes or no, got {tokens[0]['token']!r}")
        return {name: mean}
    stated = answer_text(choice).strip(" \n.").lower()
    if stated not in YES_OR_NO:
        raise ValueError(f"an answer must be yes or no, got {choice['message']!r}")
    return {name: YES_OR_NO[stated]}


def labelled(choice: dict, dimensions: Mapping[str, str]) -> Scores:
    """Return the expected digit of each dimension, the stated one without probabilities.

    ``dimensions`` has the labels, as regular expressions. If a label has several digits, the last
    one counts.
    """
    text = answer_text(choice)
    labels = "|".join(f"(?:{label})" for label in dimensions.values())
    # Between a label and its digit there may be a description, such as "– clarity, smoothness:",
    # but no other label. The digit may be written 4.0 or 4/5, but is not part of 4.5, 4-5 or 4/10.
    between = rf"(?:(?!{labels})[^:=;\d\n])*[:=][\s*_`]*"
    digit = r"([1-5])(?:\.0)?(?:\s*/\s*5)?(?!\.?\d|\s*[-–/]\s*\d)"
    scores = {}
    for name, label in dimensions.items():
        places = [
            match.start(1)
            for match in re.finditer(f"(?:{label}){between}{digit}", text, re.IGNORECASE)
        ]
        if not places:
            raise ValueError(
                f"an answer must have a digit from 1 to 5 after {label!r}, got {text!r}"
            )
        mean, total = _expected(_token_at(choice, text, places[-1]), GRADES)
        scores[name] = mean if total > 0 else float(text[places[-1]])
    return scores


ANSWERS = {
    "grades": grades,
    "text": text_scores,
    "labelled": labelled,
    "yes_no": yes_probability,
}


def _token_at(choice: dict, text: str, place: int) -> dict:
    """Return the token of a digit in the answer's text; {} without probabilities, and if the token
    is more than this digit.
    """
    tokens = (choice.get("logprobs") or {}).get("content") or []
    # the tokens of the reasoning come before the answer
    start = "".join(token["token"] for token in tokens).rfind(text)
    end = 0
    for token in tokens if start >= 0 else ():
        end += len(token["token"])
        if start + place < end:
            return token if token["token"].strip() == text[place] else {}
    return {}


def _expected(token: dict, values: dict[str, float]) -> tuple[float, float]:
    """Return the mean value of a token's alternatives, ignoring case and white space, and their
    probability.
    """
    found = [
        (each["token"].strip().lower(), math.exp(each["logprob"]))
        for each in token.get("top_logprobs") or []
    ]
    known = [(values[word], share) for word, share in found if word in values]
    total = sum(share for _, share in known)
    if not total > 0:
        return math.nan, total
    return sum(value * share for value, share in known) / total, total
