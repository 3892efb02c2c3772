"""Checks of a scorer on one clip: its answer is complete, repeats, and depends on that clip and its prompt only.

    failed     rewards would be wrong or missing: do not train with this scorer
    warning    the scorer works, and its scores may not mean what a run takes them for

``check_scorer`` works with every `Scorer`. A scorer whose dimensions are not VQ, MQ and TA names them in an attribute
``dimensions``, texts that a prompt must not contain in ``reserved``, and has a method ``doubts(num_frames, fps)``.
"""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hyvideo.models.reward_models.async_scorer import try_score
from hyvideo.models.reward_models.rewards import DIMENSIONS, Scorer, Scores, is_finite
from hyvideo.models.reward_models.trial_clips import Trial, noisy

State = Literal["ok", "warning", "failed"]
Outcome = tuple[State, str]

EXACT = 1e-4  # differences that float32 arithmetic leaves between a batch and a clip alone
TOLERANCE = 0.1  # those of VideoAlign in bf16: the original's own noise is 0.07 before it is divided by about 2


class Check(NamedTuple):
    """Result of a rule."""

    name: str
    state: State
    detail: str


class InvalidAnswer(Exception):
    """The scorer raised, or returned something else than the scores of each clip."""


@dataclass(frozen=True)
class ScorerUnderTest:
    """A scorer and the clip that it is tried on."""

    scorer: Scorer
    trial: Trial
    dimensions: tuple[str, ...]  # that must be there
    tolerance: float
    noisy: Tensor = field(repr=False)

    def ask(self, *videos: Tensor, prompts: list[str] | None = None, fps: float | None = None) -> list[Scores]:
        """Scores of the clips, under the trial's prompt and rate unless others are given. Raises InvalidAnswer."""
        prompts = [self.trial.prompt] * len(videos) if prompts is None else prompts
        results = try_score(self.scorer, list(videos), prompts, fps=self.trial.fps if fps is None else fps)
        if isinstance(results, Exception):
            raise InvalidAnswer(f"score: {type(results).__name__}: {results}")
        if reason := next((result.reason for result in results if result.reason), None):
            raise InvalidAnswer(f"score gave no scores: {reason}")
        return [result.scores for result in results]

    def gives_number(self, video: Tensor, **question) -> bool:
        """Claims that the scorer has a finite score for what it ought to refuse."""
        try:
            (scores,) = self.ask(video, **question)
        except InvalidAnswer:
            return False
        return any(is_finite(scores, name) for name in self.dimensions)

    def refusal(self, prompt: str) -> str | None:
        """Reason why ``check_prompts`` refuses a prompt, None where it does not; InvalidAnswer for another error."""
        try:
            self.scorer.check_prompts([prompt])
        except ValueError as error:
            return str(error)
        except Exception as error:
            raise InvalidAnswer(f"check_prompts raised {type(error).__name__}, not ValueError: {error}") from error
        return None

    @cached_property
    def clean_scores(self) -> Scores:
        return self.ask(self.trial.video)[0]

    @cached_property
    def noisy_scores(self) -> Scores:
        return self.ask(self.noisy)[0]

    @cached_property
    def foreign_scores(self) -> Scores:
        """Scores of the clip under the foreign prompt."""
        return self.ask(self.trial.video, prompts=[self.trial.foreign_prompt])[0]

    def difference(self, a: Scores, b: Scores) -> float:
        """Greatest difference in a promised dimension, inf where one is no number in one of them only."""
        return max(_distance(a.get(name), b.get(name)) for name in self.dimensions)


def check_scorer(
    scorer: Scorer,
    trial: Trial,
    *,
    dimensions: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    quick: bool = False,
) -> list[Check]:
    """Results of all rules; nothing is raised for what the scorer does.

    Args:
        dimensions: That the run weighs; by default those that the scorer promises.
        tolerance: Of what must be equal but for rounding, in the scorer's units. Differences from 1e-4 up to it are
            warnings.
        quick: The rules of a run's start, in five clips: complete, finite, repeatable, a batch like a clip alone.

    Raises:
        ValueError: The tolerance is not positive.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}; it is in the units of the scores")
    names = tuple(dimensions or getattr(scorer, "dimensions", DIMENSIONS))
    tested = ScorerUnderTest(scorer, trial, names, tolerance, noisy(trial.video))
    checks = []
    for name, rule in (QUICK if quick else QUICK | FULL).items():
        try:
            outcome = rule(tested)
        except InvalidAnswer as error:
            outcome = "failed", str(error)
        if outcome is not None:
            checks.append(Check(name, *outcome))
        if name == "answer" and checks[-1].state == "failed":
            break  # the other rules would say the same once more
    return checks


def has_failed(checks: list[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def lines(checks: list[Check]) -> list[str]:
    """The checks as a table."""
    width = max((len(check.name) for check in checks), default=0)
    return [f"{check.state:<7}  {check.name:<{width}}  {check.detail}" for check in checks]


def answer(tested: ScorerUnderTest) -> Outcome:
    """The prompt is accepted, and there is one dict for the clip, which is left as it was."""
    trial, before = tested.trial, tested.trial.video.clone()
    if (reason := tested.refusal(trial.prompt)) is not None:
        return "failed", f"check_prompts refuses the prompt {trial.prompt!r}: {reason}"
    scores = tested.clean_scores
    if not torch.equal(before, trial.video):
        return "failed", "score changes the clip that it is given; it must work on a copy"
    return "ok", "  ".join(f"{name} {_text(value)}" for name, value in scores.items())


def dimensions_are_finite(tested: ScorerUnderTest) -> Outcome:
    scores = tested.clean_scores
    if bad := [f"{name}: {_text(scores.get(name))}" for name in tested.dimensions if not is_finite(scores, name)]:
        return "failed", f"no finite number for {', '.join(bad)}; the scorer gives {sorted(scores)}"
    return "ok", f"all of {', '.join(tested.dimensions)}"


def repeats(tested: ScorerUnderTest) -> Outcome:
    """The same clip twice, bit for bit."""
    first, (again,) = tested.clean_scores, tested.ask(tested.trial.video)
    if again.keys() == first.keys() and not any(_distance(again[name], value) for name, value in first.items()):
        return "ok", "the same clip scores the same, bit for bit"
    apart = tested.difference(again, first)
    return "failed", f"the same clip scores {apart:.3g} apart the second time; a reward must not be random"


def batch_equals_single(tested: ScorerUnderTest) -> Outcome:
    together = tested.ask(tested.trial.video, tested.noisy)
    apart = max(map(tested.difference, together, (tested.clean_scores, tested.noisy_scores)))
    return _rounding(tested, apart, "between a batch of two clips and each alone")


def place_does_not_matter(tested: ScorerUnderTest) -> Outcome:
    """Three different questions in two orders get the answers that each gets alone, whatever stands beside it."""
    clip, prompt, foreign = tested.trial.video, tested.trial.prompt, tested.trial.foreign_prompt
    alone = [tested.clean_scores, tested.noisy_scores, tested.foreign_scores]
    first = tested.ask(clip, tested.noisy, clip, prompts=[prompt, prompt, foreign])
    moved = tested.ask(clip, clip, tested.noisy, prompts=[foreign, prompt, prompt])
    apart = max(map(tested.difference, first + moved, alone + alone[2:] + alone[:2]))
    return _rounding(tested, apart, "where clips change places and neighbours in a batch")


def the_unscorable_is_refused(tested: ScorerUnderTest) -> Outcome:
    """Clips without frames, prompts with a reserved text and, where frames per second count, broken rates."""
    clip, fps = tested.trial.video, tested.trial.fps
    reserved = {text: f"{tested.trial.prompt} {text} and more" for text in getattr(tested.scorer, "reserved", ())}
    questions = {"a clip without frames": {"video": clip[:0]}}
    questions |= {f"a prompt with {text}": {"video": clip, "prompts": [prompt]} for text, prompt in reserved.items()}
    if tested.difference(tested.ask(clip, fps=fps / 3)[0], tested.clean_scores):
        questions |= {f"a clip at {rate} frames per second": {"video": clip, "fps": rate} for rate in (0.0, math.nan)}
    with warnings.catch_warnings(action="ignore"):  # of means over nothing
        if scored := [name for name, question in questions.items() if tested.gives_number(**question)]:
            return "failed", f"{', '.join(scored)} gets a number; it must be refused, or scored NaN"
    if passing := [text for text, prompt in reserved.items() if tested.refusal(prompt) is None]:
        return "failed", f"check_prompts lets {' '.join(passing)} pass; a run would find out too late"
    return "ok", f"no number for {', '.join(questions)}"


def scores_mean_what_they_should(tested: ScorerUnderTest) -> Outcome | None:
    """The scorer's optional ``doubts`` names reasons why its scores of such clips are shifted."""
    if not hasattr(tested.scorer, "doubts"):
        return None
    doubts = tested.scorer.doubts(len(tested.trial.video), tested.trial.fps)
    return ("warning", "; ".join(doubts)) if doubts else ("ok", "the scorer has no doubts about such clips")


Rule = Callable[[ScorerUnderTest], Outcome | None]  # None where it is not about this scorer

QUICK: dict[str, Rule] = {
    "answer": answer,
    "dimensions": dimensions_are_finite,
    "repeat": repeats,
    "batch": batch_equals_single,
}
FULL: dict[str, Rule] = {
    "place": place_does_not_matter,
    "refusals": the_unscorable_is_refused,
    "doubts": scores_mean_what_they_should,
    "sign: noise": lambda tested: _falls(tested, "VQ", tested.noisy_scores, "noise"),
    "sign: prompt": lambda tested: _falls(tested, "TA", tested.foreign_scores, "a foreign prompt"),
}


def _rounding(tested: ScorerUnderTest, apart: float, where: str) -> Outcome:
    """Outcome of a difference that should be rounding alone."""
    if apart <= EXACT:
        return "ok", f"{apart:.1g} {where}"
    if apart <= tested.tolerance:
        return "warning", f"{apart:.3g} {where}: smaller differences inside a group are noise"
    return "failed", f"{apart:.3g} {where}; at most {tested.tolerance:g} is rounding, a clip must score alone"


def _falls(tested: ScorerUnderTest, dimension: str, worse: Scores, cause: str) -> Outcome:
    """Outcome of scores that should be lower in ``dimension``, in sum for a scorer without it."""
    names, clean = (dimension,) if dimension in tested.dimensions else tested.dimensions, tested.clean_scores
    detail = "  ".join(f"{name} {_text(clean.get(name))} -> {_text(worse.get(name))}" for name in names)
    if not all(is_finite(scores, name) for scores in (clean, worse) for name in names):
        return "warning", f"not tried, a score is not finite: {detail}"
    falls = sum(clean[name] - worse[name] for name in names) > 0
    return ("ok", detail) if falls else ("warning", f"{cause} does not lower it: {detail}")


def _distance(a: float | None, b: float | None) -> float:
    """Absolute difference; 0 for NaN and NaN: that a score is not finite is another rule's finding."""
    if a == b or (a != a and b != b):
        return 0.0
    are_numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (a, b))
    return abs(a - b) if are_numbers else math.inf


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "absent" if value is None else type(value).__name__
