"""Checks that a scorer's scores are complete, repeatable, and depend only on the video and its
prompt.

    failed     rewards would be wrong or missing: do not train with this scorer
    warning    the scorer works, but its scores may not mean what the run assumes

A `Scorer` may define ``dimensions`` if they are not VQ, MQ and TA, and ``noise``, the largest
difference between two scores of the same video.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from hyvideo.data.text import align_columns, describe_error, nearest
from hyvideo.rewards import contract
from hyvideo.rewards.async_scorer import try_score
from hyvideo.rewards.rewards import DIMENSIONS, Scorer, Scores, add_place, is_finite
from hyvideo.rewards.trial_clips import Trial, noisy

Outcome = tuple[str, str]  # (state, detail) of a Check

EXACT = 1e-4  # rounding differences of float32 between a batch and a single video
# smaller differences above EXACT are warnings; the noise of VideoAlign in bf16 is about half of
# 0.07
TOLERANCE = 0.1


class Check(NamedTuple):
    """Result of one check."""

    name: str
    state: str  # ok, warning or failed
    detail: str


class InvalidAnswer(Exception):
    """Raised if the scorer raises an error or does not return scores for each video."""


def check_scorer(
    scorer: Scorer,
    trial: Trial,
    *,
    dimensions: Collection[str] | None = None,  # those that must be scored; by default the scorer's
    quick: bool = False,  # only the checks before a run (``QUICK``), which score five videos
) -> list[Check]:
    """Run the checks and return their results. Errors of the scorer become failed checks."""
    return run_checks(ScorerUnderTest(scorer, trial, dimensions=dimensions), quick=quick)


def run_checks(tested: "ScorerUnderTest", *, quick: bool) -> list[Check]:
    """Run the checks of `check_scorer`; the scores that were found remain in ``tested``."""
    checks = []
    for name, rule in (QUICK if quick else QUICK | FULL).items():
        try:
            checks.append(Check(name, *rule(tested)))
        except InvalidAnswer as error:
            checks.append(Check(name, "failed", str(error)))
        if name == "answer" and has_failed(checks):
            break  # the other checks would fail for the same reason
    return checks


def has_failed(checks: list[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def lines(checks: list[Check]) -> list[str]:
    return align_columns([(check.state, check.name, check.detail) for check in checks])


class ScorerUnderTest:
    """A scorer, the trial video, and the checks."""

    def __init__(self, scorer: Scorer, trial: Trial, *, dimensions: Collection[str] | None = None):
        self.scorer = scorer
        self.trial = trial
        self.dimensions = tuple(dimensions or getattr(scorer, "dimensions", DIMENSIONS))
        self.tolerance = max(TOLERANCE, getattr(scorer, "noise", 0.0))
        self.noisy = noisy(trial.video)
        self.clean_scores: Scores = {}  # of the unchanged video; the checks set these scores
        self.noisy_scores: Scores = {}
        self.foreign_scores: Scores = {}  # of the video with the prompt that does not fit
        self.seconds: list[float] = []  # per video, of each call

    def score(self, *videos: Tensor, prompts: list[str] | None = None) -> list[Scores]:
        """Score videos, by default with the trial's prompt. Raises InvalidAnswer."""
        prompts = [self.trial.prompt] * len(videos) if prompts is None else prompts
        start = time.perf_counter()
        results = try_score(self.scorer, list(videos), prompts, fps=self.trial.fps)
        self.seconds.append((time.perf_counter() - start) / len(videos))
        if isinstance(results, BaseException):
            raise InvalidAnswer(f"score: {describe_error(results)}")
        for result in results:
            if result.reason:
                raise InvalidAnswer(f"score returned no scores: {result.reason}")
        return [result.scores for result in results]

    def difference(self, a: Scores, b: Scores) -> float:
        """Return the largest difference in any dimension; inf if only one of two scores is
        finite.
        """
        return max(_distance(a.get(name), b.get(name)) for name in self.dimensions)

    def check_answer(self) -> Outcome:
        """Check that the prompt is accepted and that score returns one dict without modifying the
        video.
        """
        before = self.trial.video.clone()
        try:
            contract.check_prompts(self.scorer, [self.trial.prompt])
        except ValueError as error:
            return "failed", f"check_prompts rejects the prompt {self.trial.prompt!r}: {error}"
        except Exception as error:
            add_place(error, type(self.scorer))
            raise InvalidAnswer(
                f"check_prompts must raise ValueError, got {describe_error(error)}"
            ) from error
        (self.clean_scores,) = self.score(self.trial.video)
        if not torch.equal(before, self.trial.video):
            return "failed", "score modifies the input video in place; modify a copy"
        return "ok", _text(self.clean_scores)

    def check_dimensions(self) -> Outcome:
        if bad := [name for name in self.dimensions if not is_finite(self.clean_scores, name)]:
            got = self.clean_scores
            hints = [nearest(name, set(got) - set(bad)) for name in bad]
            declared = getattr(self.scorer, "dimensions", None)
            if isinstance(declared, str) or (declared is None and self.dimensions == DIMENSIONS):
                hints.append(
                    f"the class needs a tuple `dimensions`: write dimensions = {tuple(got)}"
                )
            hint = (
                " ".join(filter(None, hints))
                or "check the class's `dimensions` and --reward_weights"
            )
            return (
                "failed",
                f"no finite number for {', '.join(bad)}: got {_text(got) or 'no numbers'}; {hint}",
            )
        return "ok", f"finite scores for {', '.join(self.dimensions)}"

    def check_repeat(self) -> Outcome:
        """Check that scoring the same video twice gives bit-identical scores."""
        (again,) = self.score(self.trial.video)
        # repr, so that NaN equals NaN
        if repr(sorted(again.items())) != repr(sorted(self.clean_scores.items())):
            if self.difference(again, self.clean_scores) <= getattr(self.scorer, "noise", -1.0):
                return (
                    "warning",
                    f"scoring the same video again returns {_text(again)}: rewards have this noise",
                )
            return (
                "failed",
                f"scoring the same video again returns {_text(again)}: a reward must be "
                "deterministic",
            )
        return "ok", "scoring the same video twice gives bit-identical scores"

    def check_batch(self) -> Outcome:
        (self.noisy_scores,) = self.score(self.noisy)
        together = self.score(self.trial.video, self.noisy)
        largest = max(map(self.difference, together, (self.clean_scores, self.noisy_scores)))
        return self.rounding(largest, "between scoring two videos in a batch and one by one")

    def check_order(self) -> Outcome:
        """Check that three inputs, batched in two orders, have the scores that each has alone."""
        video = self.trial.video
        prompt = self.trial.prompt
        foreign = self.trial.foreign_prompt
        (self.foreign_scores,) = self.score(video, prompts=[foreign])
        alone = [self.clean_scores, self.noisy_scores, self.foreign_scores]
        first = self.score(video, self.noisy, video, prompts=[prompt, prompt, foreign])
        rotated = self.score(video, video, self.noisy, prompts=[foreign, prompt, prompt])
        largest = max(map(self.difference, first + rotated, alone + alone[2:] + alone[:2]))
        return self.rounding(largest, "when the order of videos in a batch changes")

    def check_held_out(self) -> Outcome:
        """Check the held-out metrics, which a run checks if it has validation prompts."""
        videos, prompts = [self.trial.video, self.noisy], [self.trial.prompt] * 2
        try:
            rows = contract.held_out_each(self.scorer, videos, prompts)
            measures = contract.held_out(self.scorer, videos, prompts)
            for measure in measures.values():
                measure.of_set(measure.rows.double())
        except (Exception, SystemExit) as error:  # a scorer may raise anything
            add_place(error, type(self.scorer))
            raise InvalidAnswer(f"held-out metrics: {describe_error(error)}") from error
        names = {*measures, *(name for row in rows for name in row)}
        if taken := sorted(names & self.clean_scores.keys()):
            return (
                "failed",
                f"held-out metrics must not have the names of scores, got {', '.join(taken)}",
            )
        return "ok", f"held-out metrics: {', '.join(sorted(names)) or 'none'}"

    def check_speed(self) -> Outcome:
        """Report the seconds per video; the first call is left out, because it may load or
        compile.
        """
        seconds, shape = min(self.seconds[1:]), " x ".join(map(str, self.trial.video[:, 0].shape))
        return (
            "ok",
            f"{seconds:.2g} s per video of {shape}; 32 take {32 * seconds:.2g} s: compare with "
            "time/rollout",
        )

    def rounding(self, difference: float, where: str) -> Outcome:
        """Return the outcome for a difference that should be at most a rounding difference."""
        if difference <= EXACT:
            return "ok", f"largest difference {difference:.1g} {where}"
        if difference <= self.tolerance:
            return (
                "warning",
                f"scores differ by {difference:.3g} {where}: smaller differences are noise",
            )
        return (
            "failed",
            f"scores differ by {difference:.3g} {where}, more than the tolerance {self.tolerance:g}",
        )

    def decreases(self, dimension: str, worse: Scores, cause: str) -> Outcome:
        """Return the outcome for scores that should decrease in ``dimension``, or in their sum if
        it is not scored.
        """
        names, clean = (
            (dimension,) if dimension in self.dimensions else self.dimensions,
            self.clean_scores,
        )
        detail = f"{_text(clean, names)} -> {_text(worse, names)}"
        if not all(is_finite(scores, name) for scores in (clean, worse) for name in names):
            return "warning", f"not tested because a score is not finite: {detail}"
        decreases = sum(clean[name] - worse[name] for name in names) > 0
        return (
            ("ok", detail)
            if decreases
            else ("warning", f"{cause} does not lower the score: {detail}")
        )


QUICK: dict[str, Callable[[ScorerUnderTest], Outcome]] = {
    "answer": ScorerUnderTest.check_answer,
    "dimensions": ScorerUnderTest.check_dimensions,
    "repeat": ScorerUnderTest.check_repeat,
    "batch": ScorerUnderTest.check_batch,
}
FULL: dict[str, Callable[[ScorerUnderTest], Outcome]] = {
    "speed": ScorerUnderTest.check_speed,
    "order": ScorerUnderTest.check_order,
    "held out": ScorerUnderTest.check_held_out,
    "sign: noise": lambda tested: tested.decreases("VQ", tested.noisy_scores, "noise in the video"),
    "sign: prompt": lambda tested: tested.decreases(
        "TA", tested.foreign_scores, "a prompt that does not fit"
    ),
}


def _distance(a: object, b: object) -> float:
    """Return the absolute difference; 0 for two NaN, which `check_dimensions` reports."""
    if a == b or (a != a and b != b):
        return 0.0
    are_numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (a, b))
    return abs(a - b) if are_numbers else math.inf


def _text(scores: Scores, names: Collection[str] | None = None) -> str:
    texts = {
        name: f"{scores[name]:.4g}" if is_finite(scores, name) else scores.get(name)
        for name in names or scores
    }
    return "  ".join(f"{name} {text!s:.20}" for name, text in texts.items())
