"""Scoring in the background; a scorer that fails gives a missing reward with its reason, never a number.

    videos -> (mp4 and back, if asked for) -> every scorer -> one dict of scores, or why there is none

A batch that fails is tried again; then its videos are scored one by one, so that one broken video costs only itself. A
scorer that is out of reach (`ScorerUnavailable`) leaves the whole batch missing. One thread works, in the order of the
batches: rewards come while the next rollouts are sampled or the anchor's means are computed.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hyvideo.data.videos import read_video, write_video
from hyvideo.models.reward_models.rewards import (
    Reward,
    Scorer,
    ScoreResult,
    ScorerUnavailable,
    Scores,
    SetMeasure,
    is_finite,
    weighted,
)

NOT_FINITE = "the decoded video has values that are not finite"


class PendingBatch(NamedTuple):
    """Rewards on their way."""

    rewards: "Future[list[Reward]]"
    num_videos: int


class AsyncScorer:
    """The scorers of a run by name, in a thread."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],  # in the reward, by dimension; one may come from any scorer
        *,
        retries: int = 1,  # of a failed batch, before its videos are scored one by one
        through_file: bool = False,  # score what an H.264 file keeps of a video, as published numbers were made
        num_threads: int = 0,  # CPU threads of the background; 0 leaves the choice to torch
        offload: bool = False,  # keep scorers that can move on the CPU while they have nothing to do
        device: torch.device | None = None,  # of the scorers; on a GPU they get a stream beside that of the rollouts
        deadline: float | None = None,  # seconds that `collect` waits, after which the rest is missing; None: for all
    ):
        self.scorers, self.weights, self.deadline = dict(scorers), dict(weights), deadline
        self.retries, self.through_file, self.offload = retries, through_file, offload
        self._seconds = 0.0  # in the background, since they were last taken
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(device)  # the weights have arrived
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        set_threads = (lambda: torch.set_num_threads(num_threads)) if num_threads else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reward", initializer=set_threads)
        if offload:
            self._move("cpu")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the scorers are where they score, though they be kept on the CPU between."""
        if self.offload:
            self._move(None)
        try:
            yield
        finally:
            if self.offload:
                self._move("cpu")

    def submit(self, videos: list[Tensor | None], prompts: list[str], *, fps: float) -> PendingBatch:
        """Begins to score; `collect` waits for the result. A video that is None could not be decoded."""
        return PendingBatch(self._pool.submit(self._score_in_stream, videos, prompts, fps), len(videos))

    def collect(self, pending: list[PendingBatch], may_end: Callable[[bool], bool] = bool) -> list[Reward]:
        """The rewards of several batches, in their order. ``may_end`` is asked every second, with whether all is over
        here, and says whether the wait ends."""
        end, is_over = time.monotonic() + (self.deadline or math.inf), False
        while not may_end(is_over):
            left = max(0.0, end - time.monotonic())
            is_over = not wait([batch.rewards for batch in pending], timeout=min(left, 1.0))[1] or not left
        return [reward for batch in pending for reward in self._arrived(batch)]

    def score(self, videos: list[Tensor | None], prompts: list[str], *, fps: float) -> list[Reward]:
        """The rewards of a batch, waited for."""
        return self.collect([self.submit(videos, prompts, fps=fps)])

    def take_seconds(self) -> float:
        """Seconds of scoring in the background since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that some scorer could not score."""
        for scorer in self.scorers.values():
            scorer.check_prompts(prompts)

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> dict[str, SetMeasure]:
        """Measures of a whole set of videos that are never part of the reward; ValueError for anything else."""
        measures: dict[str, SetMeasure] = {}
        for name, scorer in self.scorers.items() if videos else ():
            with self.in_place():
                given = scorer.held_out(videos, prompts)
            if wrong := [key for key, one in given.items() if not isinstance(one, SetMeasure)]:
                raise ValueError(
                    f"held_out of reward {name} must give a SetMeasure by name, got another type for "
                    f"{', '.join(wrong)}; a measure of one video belongs in held_out_each"
                )
            measures |= given
        return measures

    def held_out_each(self, videos: list[Tensor], prompts: list[str]) -> list[Scores]:
        """Measures of each video that are never part of the reward, of the scorers that have such."""
        measures: list[Scores] = [{} for _ in videos]
        for scorer in self.scorers.values() if videos else ():
            if hasattr(scorer, "held_out_each"):
                with self.in_place():
                    given = scorer.held_out_each(videos, prompts)
                measures = [row | more for row, more in zip(measures, given)]
        return measures

    def close(self, *, wait: bool = True) -> None:
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _arrived(self, batch: PendingBatch) -> list[Reward]:
        """The rewards of a batch, or why they are not there; one that is not begun is never scored."""
        if batch.rewards.done():
            return batch.rewards.result()
        batch.rewards.cancel()
        reason = f"no reward within {self.deadline:g} s, the deadline of an iteration"
        return [Reward(math.nan, {}, reason)] * batch.num_videos

    def _score_in_stream(self, videos: list[Tensor | None], prompts: list[str], fps: float) -> list[Reward]:
        start = time.perf_counter()
        try:
            with torch.cuda.stream(self._stream) if self._stream else nullcontext(), self.in_place():
                rewards = self._score(videos, prompts, fps)
        except torch.OutOfMemoryError as error:  # as the scorers come back to the GPU
            rewards = [Reward(math.nan, {}, f"OutOfMemoryError: {error}")] * len(videos)
        self._seconds += time.perf_counter() - start
        return rewards

    def _score(self, videos: list[Tensor | None], prompts: list[str], fps: float) -> list[Reward]:
        reasons = [NOT_FINITE if v is None else None for v in videos]
        videos = self._through_files(videos, reasons, fps) if self.through_file else videos
        results = [ScoreResult({}, reason) for reason in reasons]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        for name, scorer in self.scorers.items() if rows else ():
            new = score_safely(
                scorer, [videos[i] for i in rows], [prompts[i] for i in rows], fps=fps, retries=self.retries
            )
            for row, result in zip(rows, new):
                reason = results[row].reason or (result.reason and f"{name}: {result.reason}")
                results[row] = ScoreResult(results[row].scores | result.scores, reason)
        return [self._reward(result) for result in results]

    def _reward(self, result: ScoreResult) -> Reward:
        total = weighted(result.scores, self.weights)
        reason = result.reason
        if reason is None and not math.isfinite(total):
            lacking = [name for name, weight in self.weights.items() if weight and not is_finite(result.scores, name)]
            reason = f"no finite score for {', '.join(lacking)}"
        return Reward(math.nan if reason else total, result.scores, reason)

    def _through_files(self, videos: list[Tensor | None], reasons: list[str | None], fps: float) -> list[Tensor | None]:
        """The videos as files keep them; where one cannot be written, its reason is set."""
        kept = list(videos)
        for number, video in enumerate(videos):
            if video is None:
                continue
            try:
                with tempfile.TemporaryDirectory() as folder:
                    write_video(path := Path(folder) / "video.mp4", video, fps)
                    kept[number] = read_video(path)[0]
            except (ValueError, OSError) as error:
                reasons[number] = f"no file could be made of the video: {error}"
        return kept

    def _move(self, device: str | None) -> None:
        """Moves the scorers that can be moved; None is where each belongs."""
        for scorer in self.scorers.values():
            if hasattr(scorer, "move_to"):
                scorer.move_to(device)
        if device == "cpu" and self._stream:  # what one stream leaves in the cache is of no use to another
            torch.cuda.empty_cache()


def score_safely(
    scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float, retries: int = 1
) -> list[ScoreResult]:
    """Result of each video, whatever the scorer does."""
    for attempt in range(retries + 1):
        results = try_score(scorer, videos, prompts, fps=fps)
        if isinstance(results, list):
            return results
        if isinstance(results, ScorerUnavailable):
            break
        if len(videos) > 1 and attempt == retries:
            return [score_safely(scorer, [v], [p], fps=fps, retries=0)[0] for v, p in zip(videos, prompts)]
    return [ScoreResult({}, f"{type(results).__name__}: {results}")] * len(videos)


def try_score(scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[ScoreResult] | Exception:
    """Result of each video, or the error of a scorer that raised or gave something else."""
    # Whatever a scorer raises is its failure and not the run's: it becomes the reason of a missing reward.
    try:
        scores = scorer.score(videos, prompts, fps=fps)
    except Exception as error:
        return error.with_traceback(None)  # whose frames hold memory, which the next attempt may need
    given = f"{len(scores)} results" if isinstance(scores, list) else type(scores).__name__
    if given != f"{len(videos)} results" or not all(isinstance(row, (dict, ScoreResult)) for row in scores):
        return RuntimeError(f"the scorer must give a dict for each of {len(videos)} videos, it gave {given}")
    return [row if isinstance(row, ScoreResult) else ScoreResult(row) for row in scores]
