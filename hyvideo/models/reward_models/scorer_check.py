"""Checks of a scorer on one clip: its answer is complete, repeats, and depends on that clip and its prompt only.

    failed     rewards would be wrong or missing: do not train with this scorer
    warning    the scorer works, and its scores may not mean what a run takes them for

``check_scorer`` works with every `Scorer`. A scorer whose dimensions are not VQ, MQ and TA names them in an attribute
``dimensions``, texts that a prompt must not contain in ``reserved``, has a method ``doubts(num_frames, fps)``, and says
in ``noise`` by how much its scores of the same clip may differ.
"""

import math
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from hyvideo.data.outside import align_columns
from hyvideo.models.reward_models.async_scorer import try_score
from hyvideo.models.reward_models.rewards import DIMENSIONS, Scorer, Scores, is_finite
from hyvideo.models.reward_models.trial_clips import Trial, noisy

Outcome = tuple[str, str]  # state and detail of a Check

EXACT = 1e-4  # differences that float32 arithmetic leaves between a batch and a clip alone
TOLERANCE = 0.1  # those of VideoAlign in bf16: the original's own noise is 0.07 before it is divided by about 2


class Check(NamedTuple):
    """Result of a rule."""

    name: str
    state: str  # ok, warning or failed
    detail: str


class InvalidAnswer(Exception):
    """The scorer raised, or returned something else than the scores of each clip."""


def check_scorer(
    scorer: Scorer,
    trial: Trial,
    *,
    dimensions: Collection[str] | None = None,  # that the run weighs; by default those that the scorer promises
    tolerance: float = TOLERANCE,  # in the scorer's units; rounding from 1e-4 up to it is a warning
    quick: bool = False,  # a run's start, in five clips: complete, finite, repeatable, a batch like a clip alone
) -> list[Check]:
    """Results of all rules; nothing is raised for what the scorer does."""
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}; it is in the units of the scores")
    names = tuple(dimensions or getattr(scorer, "dimensions", DIMENSIONS))
    tested = ScorerUnderTest(scorer, trial, names, max(tolerance, getattr(scorer, "noise", 0.0)))
    checks = []
    for name, rule in (QUICK if quick else QUICK | FULL).items():
        try:
            checks.append(Check(name, *rule(tested)))
        except InvalidAnswer as error:
            checks.append(Check(name, "failed", str(error)))
        if name == "answer" and has_failed(checks):
            break  # the other rules would say the same once more
    return checks


def has_failed(checks: list[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def lines(checks: list[Check]) -> list[str]:
    """The checks as a table."""
    return align_columns([(check.state, check.name, check.detail) for check in checks])


class ScorerUnderTest:
    """A scorer, the clip that it is tried on, and the rules about it."""

    def __init__(self, scorer: Scorer, trial: Trial, dimensions: tuple[str, ...], tolerance: float):
        self.scorer, self.trial, self.dimensions, self.tolerance = scorer, trial, dimensions, tolerance
        self.noisy = noisy(trial.video)
        self.clean_scores: Scores = {}  # of the clip alone, known from the first rule on
        self.noisy_scores: Scores = {}
        self.foreign_scores: Scores = {}  # of the clip under the foreign prompt

    def ask(self, *videos: Tensor, prompts: list[str] | None = None, fps: float | None = None) -> list[Scores]:
        """Scores of the clips, under the trial's prompt and rate unless others are given. Raises InvalidAnswer."""
        prompts = [self.trial.prompt] * len(videos) if prompts is None else prompts
        results = try_score(self.scorer, list(videos), prompts, fps=self.trial.fps if fps is None else fps)
        if isinstance(results, Exception):
            raise InvalidAnswer(f"score: {type(results).__name__}: {results}")
        for result in results:
            if result.reason:
                raise InvalidAnswer(f"score gave no scores: {result.reason}")
        return [result.scores for result in results]

    def gives_number(self, video: Tensor, prompt: str, fps: float) -> bool:
        """Claims that the scorer has a finite score for what it ought to refuse."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of means over nothing
                (scores,) = self.ask(video, prompts=[prompt], fps=fps)
        except InvalidAnswer:
            return False
        return any(is_finite(scores, name) for name in self.dimensions)

    def refuses(self, prompt: str) -> bool:
        """Claims that ``check_prompts`` refuses a prompt. Raises InvalidAnswer for another error than ValueError."""
        try:
            self.scorer.check_prompts([prompt])
        except ValueError:
            return True
        except Exception as error:
            raise InvalidAnswer(f"check_prompts raised {type(error).__name__}, not ValueError: {error}") from error
        return False

    def difference(self, a: Scores, b: Scores) -> float:
        """Greatest difference in a promised dimension, inf where one is no number in one of them only."""
        return max(_distance(a.get(name), b.get(name)) for name in self.dimensions)

    def answer(self) -> Outcome:
        """The prompt is accepted, and there is one dict for the clip, which is left as it was."""
        before = self.trial.video.clone()
        if self.refuses(self.trial.prompt):
            return "failed", f"check_prompts refuses the prompt {self.trial.prompt!r}"
        (self.clean_scores,) = self.ask(self.trial.video)
        if not torch.equal(before, self.trial.video):
            return "failed", "score changes the clip that it is given; it must work on a copy"
        return "ok", _text(self.clean_scores)

    def dimensions_are_finite(self) -> Outcome:
        if bad := [name for name in self.dimensions if not is_finite(self.clean_scores, name)]:
            return "failed", f"no finite number for {', '.join(bad)}; the scorer gives {_text(self.clean_scores)}"
        return "ok", f"all of {', '.join(self.dimensions)}"

    def repeats(self) -> Outcome:
        """The same clip twice, bit for bit."""
        (again,) = self.ask(self.trial.video)
        if repr(sorted(again.items())) != repr(sorted(self.clean_scores.items())):  # NaN is NaN again
            if self.difference(again, self.clean_scores) <= getattr(self.scorer, "noise", -1.0):
                return "warning", f"the same clip scores {_text(again)} the second time; its groups have this noise"
            return "failed", f"the same clip scores {_text(again)} the second time; a reward must not be random"
        return "ok", "the same clip scores the same, bit for bit"

    def batch_equals_single(self) -> Outcome:
        (self.noisy_scores,) = self.ask(self.noisy)
        together = self.ask(self.trial.video, self.noisy)
        apart = max(map(self.difference, together, (self.clean_scores, self.noisy_scores)))
        return self.rounding(apart, "between a batch of two clips and each alone")

    def place_does_not_matter(self) -> Outcome:
        """Three different questions in two orders get the answers that each gets alone, whatever stands beside it."""
        clip, prompt, foreign = self.trial.video, self.trial.prompt, self.trial.foreign_prompt
        (self.foreign_scores,) = self.ask(clip, prompts=[foreign])
        alone = [self.clean_scores, self.noisy_scores, self.foreign_scores]
        first = self.ask(clip, self.noisy, clip, prompts=[prompt, prompt, foreign])
        moved = self.ask(clip, clip, self.noisy, prompts=[foreign, prompt, prompt])
        apart = max(map(self.difference, first + moved, alone + alone[2:] + alone[:2]))
        return self.rounding(apart, "where clips change places and neighbours in a batch")

    def the_unscorable_is_refused(self) -> Outcome:
        """Clips without frames, prompts with a reserved text and, where frames per second count, broken rates."""
        clip, prompt, fps = self.trial.video, self.trial.prompt, self.trial.fps
        reserved = {text: f"{prompt} {text} and more" for text in getattr(self.scorer, "reserved", ())}
        questions = {"a clip without frames": (clip[:0], prompt, fps)}
        questions |= {f"a prompt with {text}": (clip, marked, fps) for text, marked in reserved.items()}
        if self.difference(self.ask(clip, fps=fps / 3)[0], self.clean_scores):
            questions |= {f"a clip at {rate} frames per second": (clip, prompt, rate) for rate in (0.0, math.nan)}
        if scored := [name for name, question in questions.items() if self.gives_number(*question)]:
            return "failed", f"{', '.join(scored)} gets a number; it must be refused, or scored NaN"
        if passing := [text for text, marked in reserved.items() if not self.refuses(marked)]:
            return "failed", f"check_prompts lets {' '.join(passing)} pass; a run would find out too late"
        return "ok", f"no number for {', '.join(questions)}"

    def scores_mean_what_they_should(self) -> Outcome:
        """The scorer's optional ``doubts`` names reasons why its scores of such clips are shifted."""
        doubts = self.scorer.doubts(len(self.trial.video), self.trial.fps) if hasattr(self.scorer, "doubts") else []
        return ("warning", "; ".join(doubts)) if doubts else ("ok", "the scorer names no doubts about such clips")

    def rounding(self, apart: float, where: str) -> Outcome:
        """Outcome of a difference that should be rounding alone."""
        if apart <= EXACT:
            return "ok", f"{apart:.1g} {where}"
        if apart <= self.tolerance:
            return "warning", f"{apart:.3g} {where}: smaller differences inside a group are noise"
        return "failed", f"{apart:.3g} {where}; at most {self.tolerance:g} is rounding, a clip must score alone"

    def falls(self, dimension: str, worse: Scores, cause: str) -> Outcome:
        """Outcome of scores that should be lower in ``dimension``, in sum for a scorer without it."""
        names, clean = (dimension,) if dimension in self.dimensions else self.dimensions, self.clean_scores
        detail = f"{_text(clean, names)} -> {_text(worse, names)}"
        if not all(is_finite(scores, name) for scores in (clean, worse) for name in names):
            return "warning", f"not tried, a score is not finite: {detail}"
        falls = sum(clean[name] - worse[name] for name in names) > 0
        return ("ok", detail) if falls else ("warning", f"{cause} does not lower it: {detail}")


QUICK: dict[str, Callable[[ScorerUnderTest], Outcome]] = {
    "answer": ScorerUnderTest.answer,
    "dimensions": ScorerUnderTest.dimensions_are_finite,
    "repeat": ScorerUnderTest.repeats,
    "batch": ScorerUnderTest.batch_equals_single,
}
FULL: dict[str, Callable[[ScorerUnderTest], Outcome]] = {
    "place": ScorerUnderTest.place_does_not_matter,
    "refusals": ScorerUnderTest.the_unscorable_is_refused,
    "doubts": ScorerUnderTest.scores_mean_what_they_should,
    "sign: noise": lambda tested: tested.falls("VQ", tested.noisy_scores, "noise"),
    "sign: prompt": lambda tested: tested.falls("TA", tested.foreign_scores, "a foreign prompt"),
}


def _distance(a: object, b: object) -> float:
    """Absolute difference; 0 for NaN and NaN: that a score is not finite is another rule's finding."""
    if a == b or (a != a and b != b):
        return 0.0
    are_numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (a, b))
    return abs(a - b) if are_numbers else math.inf


def _text(scores: Scores, names: Collection[str] | None = None) -> str:
    shown = {name: f"{scores[name]:.4g}" if is_finite(scores, name) else scores.get(name) for name in names or scores}
    return "  ".join(f"{name} {text!s:.20}" for name, text in shown.items())
