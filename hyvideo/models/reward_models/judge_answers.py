"""Scores in a choice of a chat completion, by kind of answer. Invalid answers raise one of ``MALFORMED``.

    grades    JSON with a whole number from 1 to 5 for each dimension:  sum_k k p_k / sum_k p_k,  p_k: P(digit k)
    text      one line "NAME Score (1-5): NUMBER" for each dimension, as UnifiedReward-2.0 answers
    yes_no    one word:  P(yes) / (P(yes) + P(no))

Without probabilities the score is the stated grade, or 1 for yes and 0 for no.
"""

import math
import re
from collections.abc import Collection, Sequence

from hyvideo.data.outside import parse_json
from hyvideo.models.reward_models.rewards import Scores

MIN_YES_OR_NO = 0.5  # smallest P(yes) + P(no); below it, the model answers something else


def grades(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the expected grade of each dimension."""
    message = choice["message"]
    text = (message["content"] or "").strip().removeprefix("```json").strip("`\n ")
    stated = parse_json(text) if text[:1] + text[-1:] == "{}" else {}
    if {*stated} != {*dimensions} or not all(type(k) is int and 1 <= k <= 5 for k in stated.values()):
        raise ValueError(f"an answer must have grades from 1 to 5 for exactly {', '.join(dimensions)}, got {message!r}")
    return expected(stated, (choice.get("logprobs") or {}).get("content") or [])


def expected(stated: Scores, tokens: list[dict]) -> Scores:
    """Return each grade's expectation over the token's alternatives; the stated grade if the tokens do not match it."""
    digits = [token for token in tokens if re.fullmatch(r"\s*[1-5]\s*", token["token"])]
    if [int(token["token"]) for token in digits] != [*stated.values()]:
        digits = [{}] * len(stated)
    scores = {}
    for (name, grade), token in zip(stated.items(), digits):
        shares = _shares(token, "12345")
        total = sum(shares.values())
        scores[name] = sum(int(k) * share for k, share in shares.items()) / total if total > 0 else float(grade)
    return scores


def text_scores(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the scores that are written in the answer, each dimension once."""
    text = choice["message"]["content"] or ""
    found = re.findall(rf"({'|'.join(dimensions)}) Score \(1-5\):\s*([-+]?\d+(?:\.\d+)?)", text)
    scores = {name: float(number) for name, number in found}
    if sorted(name for name, _ in found) != sorted(dimensions) or not all(1 <= k <= 5 for k in scores.values()):
        raise ValueError(f"an answer must have one score from 1 to 5 for {', '.join(dimensions)}, got {text!r}")
    return scores


def yes_probability(choice: dict, dimensions: Sequence[str]) -> Scores:
    """Return the probability of yes among yes and no."""
    (name,), tokens = dimensions, (choice.get("logprobs") or {}).get("content")
    if tokens and tokens[0].get("top_logprobs"):
        shares = _shares(tokens[0], ("yes", "no"))
        total = sum(shares.values())
        if not total >= MIN_YES_OR_NO:
            rule = f"the probabilities of yes and no must add up to at least {MIN_YES_OR_NO}"
            raise ValueError(f"{rule}, got {total:.3f} for {tokens[0]['token']!r}")
        return {name: shares["yes"] / total}
    stated = (choice["message"]["content"] or "").strip(" \n.").lower()
    if stated not in ("yes", "no"):
        raise ValueError(f"an answer must be yes or no, got {choice['message']!r}")
    return {name: float(stated == "yes")}


ANSWERS = {"grades": grades, "text": text_scores, "yes_no": yes_probability}


def _shares(token: dict, words: Collection[str]) -> dict[str, float]:
    """Return the probability of each word among a token's alternatives, ignoring case and white space."""
    shares = dict.fromkeys(words, 0.0)
    for alternative in token.get("top_logprobs") or []:
        if (word := alternative["token"].strip().lower()) in shares:
            shares[word] += math.exp(alternative["logprob"])
    return shares
