"""What a run relies on in a reward, tried on one clip: the answer is complete, repeats, and concerns that clip only.

    failed     rewards would be wrong or missing: do not train with this scorer
    warning    the scorer works, and its scores may not mean what a run takes them for

``check_scorer`` works with every `Scorer`. A scorer whose dimensions are not VQ, MQ and TA names them in an attribute
``dimensions``, and texts that a prompt must not contain in ``reserved``.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hyvideo.models.reward_models.rewards import Scorer, ScoreResult, Scores
from hyvideo.models.reward_models.trial_clips import Trial, noisy

State = Literal["ok", "warning", "failed"]

EXACT = 1e-4  # differences that float32 arithmetic leaves between a batch and a clip alone
TOLERANCE = 0.1  # those of VideoAlign in bf16: the original's own noise is 0.07 before it is divided by about 2


class Check(NamedTuple):
    """What became of one rule."""

    name: str
    state: State
    detail: str


class Finding(NamedTuple):
    state: State
    detail: str


class Broken(Exception):
    """The scorer gave no answer that could be judged."""


@dataclass(frozen=True)
class Declared:
    """What a scorer says of itself."""

    dimensions: tuple[str, ...]
    reserved: tuple[str, ...] = ()  # texts that no prompt may contain
    sampling: tuple[float, int | None] | None = None  # VideoAlign's: frames per second looked at, or their number
    normalisation: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Probe:
    """A scorer and the clip that it is tried on."""

    scorer: Scorer
    trial: Trial
    declared: Declared
    dimensions: tuple[str, ...]  # that must be there
    tolerance: float
    noisy: Tensor = field(repr=False)

    def ask(self, videos: list[Tensor], prompts: list[str] | None = None, *, fps: float | None = None) -> list[Scores]:
        """The scorer's answer. Raises Broken for an error and for anything but one dict per clip."""
        prompts = [self.trial.prompt] * len(videos) if prompts is None else prompts
        # Whatever a scorer raises is a finding about it.
        try:
            scores = self.scorer.score(list(videos), list(prompts), fps=self.trial.fps if fps is None else fps)
        except Exception as error:
            raise Broken(f"score raised {type(error).__name__}: {error}") from error
        if isinstance(scores, list):
            scores = [_scores_of(one) for one in scores]
        if not isinstance(scores, list) or not all(isinstance(one, Mapping) for one in scores):
            raise Broken(f"score must return a list of dicts, it returned {type(scores).__name__}")
        if len(scores) != len(videos):
            raise Broken(f"score must return one dict per clip, it returned {len(scores)} for {len(videos)} clips")
        return scores

    def refusal(self, prompt: str) -> str | None:
        """Why ``check_prompts`` refuses a prompt, None where it does not. Raises Broken for another error."""
        try:
            self.scorer.check_prompts([prompt])
        except ValueError as error:
            return str(error)
        except Exception as error:
            raise Broken(f"check_prompts raised {type(error).__name__}, not ValueError: {error}") from error
        return None

    @cached_property
    def alone(self) -> Scores:
        """The clip's scores."""
        return self.ask([self.trial.video])[0]

    @cached_property
    def noisy_alone(self) -> Scores:
        return self.ask([self.noisy])[0]

    @cached_property
    def foreign_alone(self) -> Scores:
        """The clip's scores under the foreign prompt."""
        return self.ask([self.trial.video], [self.trial.foreign_prompt])[0]

    def difference(self, a: Scores, b: Scores) -> float:
        """Greatest difference in a promised dimension, inf where one is no number in one of them only."""
        return max(_apart(a.get(name), b.get(name)) for name in self.dimensions)


def check_scorer(
    scorer: Scorer,
    trial: Trial,
    *,
    dimensions: Collection[str] | None = None,
    tolerance: float = TOLERANCE,
    quick: bool = False,
) -> list[Check]:
    """Every rule with its outcome; nothing is raised for what the scorer does.

    Args:
        dimensions: That the run weighs; by default those that the scorer promises.
        tolerance: Of what must be equal but for rounding, in the scorer's units. Differences from 1e-4 up to it are
            warnings.
        quick: What a run does at its start, in five clips: complete, finite, repeatable, a batch like a clip alone.

    Raises: ValueError for a tolerance that is not positive.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}; it is in the units of the scores")
    declared = declared_by(scorer)
    names = tuple(dimensions or declared.dimensions)
    probe = Probe(scorer, trial, declared, names, tolerance, noisy(trial.video))
    checks = []
    for name, rule in (QUICK if quick else QUICK | FULL).items():
        try:
            finding = rule(probe)
        except Broken as error:
            finding = Finding("failed", str(error))
        if finding is not None:
            checks.append(Check(name, *finding))
        if name == "answer" and checks[-1].state == "failed":
            break  # the other rules would say the same once more
    return checks


def declared_by(scorer: Scorer) -> Declared:
    """What is known of a scorer beyond the protocol."""
    from hyvideo.models.reward_models.videoalign import VideoAlignScorer
    from hyvideo.models.reward_models.videoalign.prompt import DIMENSIONS, REWARD_TOKENS, VIDEO_TOKEN

    if isinstance(scorer, VideoAlignScorer):
        settings = scorer.settings
        sampling = settings.fps, settings.num_frames
        return Declared(DIMENSIONS, (*REWARD_TOKENS, VIDEO_TOKEN), sampling, settings.normalisation or {})
    return Declared(tuple(getattr(scorer, "dimensions", DIMENSIONS)), tuple(getattr(scorer, "reserved", ())))


def has_failed(checks: list[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def lines(checks: list[Check]) -> list[str]:
    """The checks as a table."""
    wide = max((len(check.name) for check in checks), default=0)
    return [f"{check.state:<7}  {check.name:<{wide}}  {check.detail}" for check in checks]


# --- rules of every run ------------------------------------------------------------------------


def answer(probe: Probe) -> Finding:
    """The prompt is accepted, and there is one dict for the clip, which is left as it was."""
    before = probe.trial.video.clone()
    if (reason := probe.refusal(probe.trial.prompt)) is not None:
        return Finding("failed", f"check_prompts refuses the prompt {probe.trial.prompt!r}: {reason}")
    scores = probe.alone
    if not torch.equal(before, probe.trial.video):
        return Finding("failed", "score changes the clip that it is given; it must work on a copy")
    return Finding("ok", "  ".join(f"{name} {_shown(value)}" for name, value in scores.items()))


def dimensions_are_finite(probe: Probe) -> Finding:
    bad = [f"{name}: {_shown(probe.alone.get(name))}" for name in probe.dimensions if not _is_finite(probe.alone, name)]
    if bad:
        return Finding("failed", f"no finite number for {', '.join(bad)}; the scorer gives {sorted(probe.alone)}")
    return Finding("ok", f"all of {', '.join(probe.dimensions)}")


def repeats(probe: Probe) -> Finding:
    """The same clip twice, bit for bit."""
    again = probe.ask([probe.trial.video])[0]
    if again.keys() == probe.alone.keys() and all(_same(again[name], value) for name, value in probe.alone.items()):
        return Finding("ok", "the same clip scores the same, bit for bit")
    apart = probe.difference(again, probe.alone)
    return Finding("failed", f"the same clip scores {apart:.3g} apart the second time; a reward must not be random")


def batch_equals_single(probe: Probe) -> Finding:
    together = probe.ask([probe.trial.video, probe.noisy])
    apart = max(map(probe.difference, together, (probe.alone, probe.noisy_alone)))
    return _rounding(probe, apart, "between a batch of two clips and each alone")


QUICK: dict[str, Callable[[Probe], Finding | None]] = {
    "answer": answer,
    "dimensions": dimensions_are_finite,
    "repeat": repeats,
    "batch": batch_equals_single,
}


# --- rules that are tried once ---------------------------------------------------------------------


def order_does_not_matter(probe: Probe) -> Finding:
    """Three different questions in another order get the same answers, each its own."""
    videos = [probe.trial.video, probe.noisy, probe.trial.video]
    prompts = [probe.trial.prompt, probe.trial.prompt, probe.trial.foreign_prompt]
    order = [2, 0, 1]
    scores = probe.ask(videos, prompts)
    moved = probe.ask([videos[i] for i in order], [prompts[i] for i in order])
    apart = max(probe.difference(one, scores[i]) for one, i in zip(moved, order))
    return _rounding(probe, apart, "when clips change places in a batch")


def neighbours_do_not_matter(probe: Probe) -> Finding:
    others = probe.trial.video, probe.noisy, torch.zeros_like(probe.trial.video)
    first, *rest = (probe.ask([probe.trial.video, other])[0] for other in others)
    return _rounding(probe, max(probe.difference(one, first) for one in rest), "with another clip beside it")


def nothing_is_scored_for_no_frames(probe: Probe) -> Finding:
    """A clip without frames is refused, or its scores are not finite."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of means over nothing
            (scores,) = probe.ask([probe.trial.video[:0]])
    except Broken:
        return Finding("ok", "a clip without frames is refused")
    if any(_is_finite(scores, name) for name in probe.dimensions):
        return Finding("failed", "a clip without frames gets a number; it must be refused, or scored NaN")
    return Finding("ok", "a clip without frames has no finite score")


def fps_is_understood(probe: Probe) -> Finding:
    """Whether the frames per second count; where they do, a broken rate must not be scored."""
    apart = probe.difference(probe.ask([probe.trial.video], fps=probe.trial.fps / 3)[0], probe.alone)
    if apart == 0 and probe.declared.sampling is None:
        return Finding("ok", "frames per second do not enter the score")
    for rate in (0.0, math.nan):
        try:
            (scores,) = probe.ask([probe.trial.video], fps=rate)
        except Broken:
            continue
        if any(_is_finite(scores, name) for name in probe.dimensions):
            return Finding("failed", f"a clip at {rate} frames per second gets a number; it must be refused")
    return Finding("ok", f"at a third of the rate the score differs by {apart:.3g}: give the clip's true rate")


def enough_frames(probe: Probe) -> Finding | None:
    """VideoAlign looks at 2 frames a second and at no less than 4: below 2 seconds it sees more of them a second."""
    if probe.declared.sampling is None:
        return None
    from hyvideo.models.reward_models.videoalign.preprocessing import frame_indices

    fps, wanted = probe.declared.sampling
    count, rate = len(probe.trial.video), probe.trial.fps
    looked_at = len(frame_indices(count, rate, fps=fps, wanted=wanted))
    detail = f"looks at {looked_at} of {count} frames, {count / rate:.2f} s"
    if wanted is None and looked_at > count / rate * fps + 1:
        return Finding("warning", f"{detail}: more than its {fps:g} a second, scores of so short clips are shifted")
    return Finding("ok", detail)


def normalisation_is_there(probe: Probe) -> Finding | None:
    constants = probe.declared.normalisation
    if constants is None:
        return None
    if not constants:
        return Finding("warning", "none: scores are raw, and weights between dimensions mean something else")
    names = [f"{name}_{kind}" for name in probe.declared.dimensions for kind in ("mean", "std")]
    bad = [n for n in names if not _is_finite(constants, n) or (n.endswith("std") and constants[n] <= 0)]
    if bad:
        return Finding("failed", f"no usable constant {', '.join(bad)}; download model_config.json again")
    return Finding("ok", "  ".join(f"{name} {constants[name]:g}" for name in names))


def reserved_texts_are_refused(probe: Probe) -> Finding | None:
    if not probe.declared.reserved:
        return None
    for text in probe.declared.reserved:
        prompt = f"{probe.trial.prompt} {text} and more"
        if probe.refusal(prompt) is None:
            return Finding("failed", f"check_prompts lets {text} pass; a run would find out too late")
        try:
            (scores,) = probe.ask([probe.trial.video], [prompt])
        except Broken:
            continue
        if any(_is_finite(scores, name) for name in probe.dimensions):
            return Finding("failed", f"a prompt with {text} gets a number; it must be refused")
    return Finding("ok", f"refused: {' '.join(probe.declared.reserved)}")


def clean_beats_noisy(probe: Probe) -> Finding:
    return _falls(probe, "VQ", probe.noisy_alone, "noise")


def matching_beats_foreign(probe: Probe) -> Finding:
    if probe.trial.prompt == probe.trial.foreign_prompt:
        return Finding("warning", "not tried: the foreign prompt is the clip's own")
    return _falls(probe, "TA", probe.foreign_alone, "a foreign prompt")


FULL: dict[str, Callable[[Probe], Finding | None]] = {
    "order": order_does_not_matter,
    "neighbours": neighbours_do_not_matter,
    "no frames": nothing_is_scored_for_no_frames,
    "fps": fps_is_understood,
    "frames": enough_frames,
    "normalisation": normalisation_is_there,
    "reserved texts": reserved_texts_are_refused,
    "sign: noise": clean_beats_noisy,
    "sign: prompt": matching_beats_foreign,
}


# --- shared judgements -------------------------------------------------------------------------


def _rounding(probe: Probe, apart: float, where: str) -> Finding:
    """Judges a difference that should be rounding alone."""
    if apart <= EXACT:
        return Finding("ok", f"{apart:.1g} {where}")
    if apart <= probe.tolerance:
        return Finding("warning", f"{apart:.3g} {where}: smaller differences inside a group are noise")
    return Finding("failed", f"{apart:.3g} {where}; at most {probe.tolerance:g} is rounding, a clip must score alone")


def _falls(probe: Probe, dimension: str, worse: Scores, cause: str) -> Finding:
    """Whether ``dimension`` falls, all of them together for a scorer without it."""
    names = (dimension,) if dimension in probe.dimensions else probe.dimensions
    shown = "  ".join(f"{name} {_shown(probe.alone.get(name))} -> {_shown(worse.get(name))}" for name in names)
    if not all(_is_finite(scores, name) for scores in (probe.alone, worse) for name in names):
        return Finding("warning", f"not tried, a score is not finite: {shown}")
    falls = sum(probe.alone[name] - worse[name] for name in names) > 0
    return Finding("ok", shown) if falls else Finding("warning", f"{cause} does not lower it: {shown}")


def _apart(a: float | None, b: float | None) -> float:
    if _same(a, b):
        return 0.0
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (a, b))
    return abs(a - b) if numbers else math.inf


def _scores_of(answer: object) -> object:
    """The scores of a verdict; what is no verdict as it is. Raises Broken for a verdict without scores."""
    if not isinstance(answer, ScoreResult):
        return answer
    if answer.reason:
        raise Broken(f"score gave no scores: {answer.reason}")
    return answer.scores


def _same(a: float | None, b: float | None) -> bool:
    """Equal, where NaN equals NaN: that a score is not finite is another rule's finding."""
    return a == b or (a != a and b != b)


def _is_finite(scores: Mapping[str, float], name: str) -> bool:
    return isinstance(scores.get(name), (int, float)) and math.isfinite(scores[name])


def _shown(value: float | None) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "absent" if value is None else type(value).__name__
