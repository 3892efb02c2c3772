"""Scoring in a background thread. If a scorer fails, the reward is missing, with a reason, and never a number.

    videos -> (optional mp4 round trip) -> every scorer -> one dict of scores per video, or the reason why it is missing

A failed batch is retried; then its videos are scored one by one, so that a bad video affects only its own reward. If a
scorer is unreachable (`ScorerUnavailable`), the rewards of the whole batch are missing.
"""

import math
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hyvideo.data.outside import describe_error, shorten
from hyvideo.data.videos import read_video, write_video
from hyvideo.models.reward_models.rewards import (
    Reward,
    Scorer,
    ScoreResult,
    ScorerUnavailable,
    Scores,
    SetMeasure,
    clean_scores,
    is_finite,
    weighted_sum,
)

Batch = tuple[list[Tensor | None], list[str]]  # videos and their prompts
NOT_FINITE = "the decoded video has values that are not finite"


class PendingBatch(NamedTuple):
    """One or more batches whose rewards are being computed."""

    rewards: "Future[list[Reward]]"
    num_videos: int
    finished: list[Reward]  # of the batches that are done
    is_canceled: threading.Event  # ends the scoring after the current batch


class AsyncScorer:
    """The scorers of a run, by name, called in a background thread."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float],  # weight of each dimension in the reward; any scorer may return the dimension
        *,
        retries: int = 1,  # of a failed batch, before its videos are scored one by one
        through_file: bool = False,  # score videos after H.264 compression, as in published evaluations
        num_threads: int = 0,  # CPU threads for scoring; 0 is torch's default
        offload: bool = False,  # keep scorers that have `move_to` on the CPU while they are idle
        held_out: "AsyncScorer | None" = None,  # scorers that only `measure` uses
        is_held_out: bool = False,  # name dimensions held_out/SCORER/DIMENSION
        device: torch.device | None = None,  # device of the scorers; on a GPU they use a separate stream
        deadline: float | None = None,  # seconds after which `collect` counts rewards as missing; None: no limit
    ):
        self.scorers, self.weights, self.deadline = dict(scorers), dict(weights), deadline
        self.retries, self.through_file, self.offload = retries, through_file, offload
        self.held_out_scorers, self._is_held_out = held_out, is_held_out
        self.spans: list[tuple[float, float]] = []  # start and end of the jobs, on the clock of `time.perf_counter`
        self._is_closed = False
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(device)  # wait until the weights are on the GPU
        self._stream = stream = torch.cuda.Stream(device) if is_cuda else None

        def prepare_thread() -> None:  # without self, whose deletion ends the thread
            if num_threads:
                torch.set_num_threads(num_threads)
            if stream:  # a new thread starts on GPU 0, where leaving the stream would create a CUDA context
                torch.cuda.set_device(stream.device)

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reward", initializer=prepare_thread)
        if offload:
            self._move("cpu")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context manager that moves offloaded scorers to their device, and back to the CPU afterwards."""
        if self.offload:
            self._move(None)
        try:
            yield
        finally:
            if self.offload:
                self._move("cpu")

    def submit(self, *batches: Batch, fps: float) -> PendingBatch:
        """Start scoring batches in order, for which offloaded scorers are moved to their device once.

        Returns what `collect` waits for. A video is None if it could not be decoded.
        """
        finished, is_canceled = [], threading.Event()
        rewards = self._pool.submit(self._score_in_stream, batches, fps, finished, is_canceled)
        return PendingBatch(rewards, sum(len(videos) for videos, _ in batches), finished, is_canceled)

    def collect(self, pending: list[PendingBatch], may_end: Callable[[bool], bool] = bool) -> list[Reward]:
        """Wait for batches and return their rewards in order; rewards that are not ready in time are missing.

        ``may_end(is_done)``, with whether this process is done, is called every second and returns whether to stop.
        """
        end, is_done = time.monotonic() + (self.deadline or math.inf), False
        while not may_end(is_done):
            remaining = max(0.0, end - time.monotonic())
            is_done = not wait([batch.rewards for batch in pending], timeout=min(remaining, 1.0))[1] or not remaining
        return [reward for batch in pending for reward in self._finished_rewards(batch)]

    def measure(self, *batch: list, fps: float, may_end: Callable[[bool], bool] = bool) -> list[Reward]:
        """Score a batch also with the held-out scorers, whose failures make only their own scores missing."""
        pending = [scorer.submit(batch, fps=fps) for scorer in (self, self.held_out_scorers) if scorer]
        together = self.collect(pending, may_end)
        if not self.held_out_scorers:
            return together
        rewards, others = together[: len(batch[0])], together[len(batch[0]) :]
        if reasons := [other.reason for other in others if other.reason]:
            lacking = f"{len(reasons)} of {len(others)} videos lack held-out scores"
            print(f"\n{lacking}; first reason: {reasons[0]}", file=sys.stderr, flush=True)
        return [replace(reward, scores=reward.scores | other.scores) for reward, other in zip(rewards, others)]

    def check_prompts(self, prompts: Iterable[str], validated: Iterable[str] = ()) -> None:
        """Raise ValueError if a scorer cannot score one of its prompts; held-out scorers see only ``validated``."""
        for scorer in self.scorers.values():
            scorer.check_prompts([*prompts, *validated])
        if self.held_out_scorers:
            self.held_out_scorers.check_prompts(validated)

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> dict[str, SetMeasure]:
        """Return the held-out metrics of the whole set of videos. Raises ValueError for other types than SetMeasure."""
        measures: dict[str, SetMeasure] = {}
        for name, scorer in self.scorers.items() if videos else ():
            with self.on_device():
                metrics = scorer.held_out(videos, prompts)
            if wrong := [key for key, measure in metrics.items() if not isinstance(measure, SetMeasure)]:
                raise ValueError(
                    f"held_out of reward {name} must return a dict of SetMeasure, got another type for "
                    f"{', '.join(wrong)}; return metrics of single videos from held_out_each"
                )
            measures |= metrics
        return measures | (self.held_out_scorers.held_out(videos, prompts) if self.held_out_scorers else {})

    def held_out_each(self, videos: list[Tensor], prompts: list[str]) -> list[Scores]:
        """Return the held-out metrics of each video, from the scorers that define ``held_out_each``."""
        measures: list[Scores] = [{} for _ in videos]
        for scorer in self.scorers.values() if videos else ():
            if hasattr(scorer, "held_out_each"):
                with self.on_device():
                    rows = scorer.held_out_each(videos, prompts)
                measures = [measure | clean_scores(row) for measure, row in zip(measures, rows)]
        others = self.held_out_scorers.held_out_each(videos, prompts) if self.held_out_scorers else measures
        return [measure | other for measure, other in zip(measures, others)]

    def close(self, *, wait: bool = True) -> None:
        if self.held_out_scorers:
            self.held_out_scorers.close(wait=wait)
        self._is_closed = True
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def _finished_rewards(self, batch: PendingBatch) -> list[Reward]:
        """Return the rewards; if some are not ready, return them as missing and cancel what has not started."""
        if batch.rewards.done():
            return batch.rewards.result()
        batch.rewards.cancel()
        batch.is_canceled.set()
        finished, reason = [*batch.finished], f"no reward within the deadline of {self.deadline:g} s"
        return finished + [Reward(math.nan, {}, reason)] * (batch.num_videos - len(finished))

    def _score_in_stream(
        self, batches: list[Batch], fps: float, finished: list[Reward], is_canceled: threading.Event
    ) -> list[Reward]:
        start = time.perf_counter()
        try:
            with torch.cuda.stream(self._stream) if self._stream else nullcontext(), self.on_device():
                for batch in batches:
                    if self._is_closed or is_canceled.is_set():
                        break
                    finished.extend(self._score(*batch, fps))
        except torch.OutOfMemoryError as error:  # while the scorers move to the GPU
            num_missing = sum(len(videos) for videos, _ in batches) - len(finished)
            finished += [Reward(math.nan, {}, f"OutOfMemoryError: {error}")] * num_missing
        self.spans.append((start, time.perf_counter()))
        return finished

    def _score(self, videos: list[Tensor | None], prompts: list[str], fps: float) -> list[Reward]:
        reasons = [NOT_FINITE if v is None else None for v in videos]
        videos = self._compress(videos, reasons, fps) if self.through_file else videos
        results = [ScoreResult({}, reason) for reason in reasons]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        for name, scorer in self.scorers.items() if rows else ():
            new = score_safely(
                scorer, [videos[i] for i in rows], [prompts[i] for i in rows], fps=fps, retries=self.retries
            )
            for row, result in zip(rows, new):
                reason = results[row].reason or (result.reason and f"{name}: {result.reason}")
                prefix = f"held_out/{name.rpartition(':')[2]}/" if self._is_held_out else ""
                scores = {f"{prefix}{dimension}": score for dimension, score in result.scores.items()}
                results[row] = ScoreResult(results[row].scores | scores, reason)
        return [self._reward(result) for result in results]

    def _reward(self, result: ScoreResult) -> Reward:
        total = weighted_sum(result.scores, self.weights)
        reason = result.reason
        if reason is None and not math.isfinite(total):
            missing = [name for name, weight in self.weights.items() if weight and not is_finite(result.scores, name)]
            reason = f"no finite score for {', '.join(missing) or 'the weighted sum'}"
        return Reward(math.nan if reason else total, result.scores, reason)

    def _compress(self, videos: list[Tensor | None], reasons: list[str | None], fps: float) -> list[Tensor | None]:
        """Return the videos after an mp4 round trip; set the reason for each video that cannot be written."""
        compressed = list(videos)
        for number, video in enumerate(videos):
            if video is None:
                continue
            try:
                with tempfile.TemporaryDirectory() as folder:
                    write_video(path := Path(folder) / "video.mp4", video, fps)
                    compressed[number] = read_video(path)[0]
            except (ValueError, OSError) as error:
                reasons[number] = f"the video could not be written to a file: {error}"
        return compressed

    def _move(self, device: str | None) -> None:
        """Move the scorers that can be moved; None moves each to its own device."""
        for scorer in self.scorers.values():
            if hasattr(scorer, "move_to"):
                scorer.move_to(device)
        if device == "cpu" and self._stream:  # other streams cannot reuse memory that is cached for this stream
            torch.cuda.empty_cache()


def score_safely(
    scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float, retries: int = 1
) -> list[ScoreResult]:
    """Return a result for each video, even if the scorer fails."""
    for attempt in range(retries + 1):
        results = try_score(scorer, videos, prompts, fps=fps)
        if isinstance(results, list):
            return results
        if isinstance(results, ScorerUnavailable):
            break
        if len(videos) > 1 and attempt == retries:
            return [score_safely(scorer, [v], [p], fps=fps, retries=0)[0] for v, p in zip(videos, prompts)]
    return [ScoreResult({}, describe_error(results))] * len(videos)


def try_score(
    scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float
) -> list[ScoreResult] | BaseException:
    """Return the result of each video, or the error if the scorer raised one or returned another type."""
    # Any exception of a scorer becomes the reason for a missing reward and does not stop the run, even SystemExit.
    try:
        scores = scorer.score(videos, prompts, fps=fps)
        is_list = isinstance(scores, list)
        if is_list and len(scores) == len(videos) and all(isinstance(row, (dict, ScoreResult)) for row in scores):
            results = [row if isinstance(row, ScoreResult) else ScoreResult(row) for row in scores]
            return [ScoreResult(clean_scores(r.scores), r.reason and shorten(str(r.reason))) for r in results]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        add_place(error, scorer)
        return error.with_traceback(None)  # the traceback's frames hold memory that the next attempt may need
    types = " or ".join(sorted({type(row).__name__ for row in scores})) if is_list else ""
    got = f"a list of {len(scores)} {types}".rstrip() if is_list else type(scores).__name__
    return RuntimeError(f"score must return a list with one dict per video ({len(videos)}), got {got}")


def add_place(error: BaseException, scorer: Scorer) -> None:
    """Add the line in the file of the scorer's class where an error was raised, as a note for `describe_error`."""
    file = getattr(sys.modules.get(type(scorer).__module__), "__file__", None)
    if frames := [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]:
        error.add_note(f"{Path(file).name}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}")
