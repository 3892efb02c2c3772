"""Scores in the background, and what becomes of a scorer that fails: a missing reward with its reason, never a number.

    videos -> (mp4 and back, if asked for) -> every scorer -> one dict of scores, or why there is none

A batch that fails is tried again; then its videos are scored one by one, so that one broken video costs only itself. A
scorer that is out of reach (`ScorerUnavailable`) leaves the whole batch missing. One thread works, in the order of the
batches: rewards come while the next rollouts are sampled or the anchor's means are computed.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.data.videos import read_video, write_video
from hyvideo.models.reward_models.rewards import Reward, Scorer, ScoreResult, ScorerUnavailable, Scores, weighted


@dataclass
class ScoringTimes:
    """Seconds since they were last taken."""

    scoring: float = 0.0  # in the background
    waiting: float = field(default=0.0)  # of who wanted the result


class AsyncScorer:
    """All scorers of a run.

    Args:
        scorers: By name.
        weights: Of each dimension in the reward; a dimension may come from any scorer.
        retries: Times that a failed batch is tried again before its videos are scored one by one.
        through_file: Score what an H.264 file keeps of a video, as published numbers were made.
        num_threads: CPU threads of the background; 0 leaves the choice to torch.
        offload: Keep scorers that can move on the CPU while they have nothing to do.
        device: Of the scorers; on a GPU they get a stream of their own, beside that of the rollouts.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],
        *,
        retries: int = 1,
        through_file: bool = False,
        num_threads: int = 0,
        offload: bool = False,
        device: torch.device | None = None,
    ):
        self.scorers, self.weights = dict(scorers), dict(weights)
        self.retries, self.through_file, self.offload = retries, through_file, offload
        self.times = ScoringTimes()
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(device)  # the weights have arrived
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        start = (lambda: torch.set_num_threads(num_threads)) if num_threads else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reward", initializer=start)
        if offload:
            self._move("cpu")

    def submit(self, videos: list[Tensor | None], prompts: list[str], *, fps: float) -> "Future[list[Reward]]":
        """Begins to score; `collect` waits for the result. A video that is None could not be decoded."""
        return self._pool.submit(self._in_own_stream, videos, prompts, fps)

    def collect(self, pending: "list[Future[list[Reward]]]") -> list[Reward]:
        """The rewards of several batches, in their order."""
        start = time.perf_counter()
        rewards = [reward for batch in pending for reward in batch.result()]
        self.times.waiting += time.perf_counter() - start
        return rewards

    def score(self, videos: list[Tensor | None], prompts: list[str], *, fps: float) -> list[Reward]:
        """The rewards of a batch, waited for."""
        return self.collect([self.submit(videos, prompts, fps=fps)])

    def take_times(self) -> ScoringTimes:
        taken, self.times = self.times, ScoringTimes()
        return taken

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that some scorer could not score."""
        for scorer in self.scorers.values():
            scorer.check_prompts(prompts)

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> Scores:
        """Measures of a whole set of videos that are never part of the reward, of all scorers."""
        measures: Scores = {}
        for scorer in self.scorers.values():
            measures |= scorer.held_out(videos, prompts)
        return measures

    def held_out_each(self, videos: list[Tensor], prompts: list[str]) -> list[Scores]:
        """Measures of each video that are never part of the reward, of the scorers that have such."""
        measures: list[Scores] = [{} for _ in videos]
        for scorer in self.scorers.values() if videos else ():
            if hasattr(scorer, "held_out_each"):
                measures = [one | more for one, more in zip(measures, scorer.held_out_each(videos, prompts))]
        return measures

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _in_own_stream(self, videos: list[Tensor | None], prompts: list[str], fps: float) -> list[Reward]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return self._judge(videos, prompts, fps)

    def _judge(self, videos: list[Tensor | None], prompts: list[str], fps: float) -> list[Reward]:
        start = time.perf_counter()
        if self.offload:
            self._move(None)
        reasons = ["the decoded video has values that are not finite" if v is None else None for v in videos]
        shown = self._through_files(videos, reasons, fps) if self.through_file else videos
        verdicts = [ScoreResult({}, reason) for reason in reasons]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        for name, scorer in self.scorers.items() if rows else ():
            said = score_safely(
                scorer, [shown[i] for i in rows], [prompts[i] for i in rows], fps=fps, retries=self.retries
            )
            for row, one in zip(rows, said):
                verdicts[row] = _joined(verdicts[row], one, name)
        if self.offload:
            self._move("cpu")
        self.times.scoring += time.perf_counter() - start
        return [self._reward(verdict) for verdict in verdicts]

    def _reward(self, verdict: ScoreResult) -> Reward:
        total = weighted(verdict.scores, self.weights)
        if verdict.reason is None and not math.isfinite(total):
            lacking = [name for name, weight in self.weights.items() if weight and not _is_number(verdict.scores, name)]
            verdict = ScoreResult(verdict.scores, f"no finite score for {', '.join(lacking)}")
        return Reward(math.nan if verdict.reason else total, verdict.scores, verdict.reason)

    def _through_files(self, videos: list[Tensor | None], reasons: list[str | None], fps: float) -> list[Tensor | None]:
        """What files keep of the videos; where one cannot be written, its reason is set."""
        shown = list(videos)
        with tempfile.TemporaryDirectory() as folder:
            for number, video in enumerate(videos):
                path = Path(folder) / f"{number}.mp4"
                try:
                    if video is not None:
                        write_video(path, video, fps)
                        shown[number] = read_video(path)[0]
                except (ValueError, OSError) as error:
                    reasons[number] = f"no file could be made of the video: {error}"
        return shown

    def _move(self, device: str | None) -> None:
        """Moves the scorers that can be moved; None is where each belongs."""
        for scorer in self.scorers.values():
            if hasattr(scorer, "move_to"):
                scorer.move_to(device)


def score_safely(
    scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float, retries: int = 1
) -> list[ScoreResult]:
    """One verdict for each video, whatever the scorer does."""
    for attempt in range(retries + 1):
        said = _attempt(lambda: scorer.score(videos, prompts, fps=fps), len(videos))
        if isinstance(said, list):
            return [one if isinstance(one, ScoreResult) else ScoreResult(one) for one in said]
        if isinstance(said, ScorerUnavailable):
            return [ScoreResult({}, _told(said))] * len(videos)
        if len(videos) > 1 and attempt == retries:
            return [
                verdict
                for video, prompt in zip(videos, prompts)
                for verdict in score_safely(scorer, [video], [prompt], fps=fps, retries=0)
            ]
    return [ScoreResult({}, _told(said))] * len(videos)


def _attempt(score: Callable[[], list[Scores | ScoreResult]], count: int) -> list[Scores | ScoreResult] | Exception:
    # Whatever a scorer raises is its failure and not the run's: it becomes the reason of a missing reward.
    try:
        scores = score()
    except Exception as error:
        return error
    if (
        not isinstance(scores, list)
        or len(scores) != count
        or not all(isinstance(s, (dict, ScoreResult)) for s in scores)
    ):
        shown = f"{len(scores)} results" if isinstance(scores, list) else type(scores).__name__
        return RuntimeError(f"the scorer must give a dict for each of {count} videos, it gave {shown}")
    return scores


def _joined(before: ScoreResult, new: ScoreResult, name: str) -> ScoreResult:
    reason = before.reason or (f"{name}: {new.reason}" if new.reason else None)
    return ScoreResult(before.scores | new.scores, reason)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_number(scores: Scores, name: str) -> bool:
    return isinstance(scores.get(name), (int, float)) and math.isfinite(scores[name])
