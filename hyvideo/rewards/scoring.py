"""Scoring in a background thread.

If a scorer fails, the reward is missing, with a reason, and never a number.

    videos -> (optional mp4 round trip) -> every scorer -> one dict of scores per video, or the reason why it is missing

A failed batch is retried; then its videos are scored one by one, so that a bad video affects only
its own reward. If a scorer is unreachable (`ScorerUnavailable`), the rewards of the whole batch are
missing.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hyvideo.files.custom_code import Worker, add_place
from hyvideo.files.text import describe_error
from hyvideo.rewards import contract
from hyvideo.rewards.names import MetricNames
from hyvideo.rewards.rewards import (
    Reward,
    Scorer,
    ScoreResult,
    ScorerUnavailable,
    is_finite,
    weighted_sum,
)

T = TypeVar("T")
Batch = tuple[list[Tensor | None], list[str]]  # videos and their prompts
DEADLINE = 1800.0  # seconds for the scores of a batch of up to DEADLINE_VIDEOS
DEADLINE_VIDEOS = 16
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
        # of dimensions, or by scorer; see `MetricNames`
        weights: Mapping[str, float | Mapping[str, float]],
        *,
        retries: int = 1,  # of a failed batch, before its videos are scored one by one
        num_threads: int = 0,  # CPU threads for scoring; 0 is torch's default
        offload: bool = False,  # keep scorers that have `move_to` on the CPU while they are idle
        held_out: "AsyncScorer | None" = None,  # scorers that only `measure` uses
        is_held_out: bool = False,  # name dimensions held_out/SCORER/DIMENSION
        # device of the scorers; on a GPU they use a separate stream
        device: torch.device | None = None,
        # seconds for a batch, after which `collect` counts its rewards as missing
        deadline: float = DEADLINE,
    ):
        self.scorers = dict(scorers)
        self.names = MetricNames(self.scorers, weights, is_held_out=is_held_out)
        self.weights = self.names.weights
        self.deadline = deadline
        self.retries = retries
        self.offload = offload
        self.held_out_scorers = held_out
        # start and end of the jobs, on the clock of `time.perf_counter`
        self.spans: list[tuple[float, float]] = []
        self._is_closed = False
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(device)  # wait until the weights are on the GPU
        self._stream = stream = torch.cuda.Stream(device) if is_cuda else None

        def prepare_thread() -> None:  # without self, whose deletion ends the thread
            if num_threads:
                torch.set_num_threads(num_threads)
            # a new thread starts on GPU 0, where leaving the stream would create a CUDA context
            if stream:
                torch.cuda.set_device(stream.device)

        self._worker = Worker(prepare_thread)
        self._late: Future | None = None  # a job that has exceeded its deadline
        if offload:
            self._move("cpu")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context manager that moves offloaded scorers to their device, and back to the CPU
        afterwards.
        """
        if self.offload:
            self._move(None)
        try:
            yield
        finally:
            if self.offload:
                self._move("cpu")

    def submit(self, *batches: Batch, fps: float) -> PendingBatch:
        """Start scoring batches in order, for which offloaded scorers are moved to their device
        once.

        Returns what `collect` waits for. A video is None if it could not be decoded.
        """
        finished: list[Reward] = []
        is_canceled = threading.Event()
        job = partial(self._score_in_stream, batches, fps, finished, is_canceled)
        num_videos = sum(len(videos) for videos, _ in batches)
        return PendingBatch(self._worker.submit(job), num_videos, finished, is_canceled)

    def collect(
        self, pending: list[PendingBatch], may_end: Callable[[bool], bool] = bool
    ) -> list[Reward]:
        """Wait for batches and return their rewards in order; rewards that are not ready in time
        are missing.

        The deadline starts again with each batch that is ready, and is longer for batches of more
        than ``DEADLINE_VIDEOS``. While a scorer still hangs in an earlier batch, nothing is waited
        for. ``may_end(is_done)``, with whether this process is done, is called every second and
        returns whether to stop.
        """
        largest = max((batch.num_videos for batch in pending), default=0)
        patience = self.deadline * max(1.0, largest / DEADLINE_VIDEOS)
        end = time.monotonic()
        if not self._hangs:
            end += patience
        num_finished = 0
        is_done = False
        while not may_end(is_done):
            remaining = max(0.0, end - time.monotonic())
            waiting = wait([batch.rewards for batch in pending], timeout=min(remaining, 1.0))[1]
            finished = sum(len(batch.finished) for batch in pending)
            if finished > num_finished:
                num_finished = finished
                end = time.monotonic() + patience
            is_done = not waiting or not remaining
        return [reward for batch in pending for reward in self._finished_rewards(batch)]

    def call(self, name: str, function: Callable[[], T]) -> T:
        """Call code of the scorer ``name`` in the thread that scores, and return its result.

        Raises what it raises, and ValueError after the deadline.
        """

        def job() -> T:
            with self._in_stream(), self.on_device():
                result = function()
            if self._stream:
                self._stream.synchronize()
            return result

        future = self._worker.submit(job)
        timeout = 0.0 if self._hangs else self.deadline
        try:
            return future.result(timeout)
        except TimeoutError as error:
            if future.done():  # the code itself raises it
                raise
            if not future.cancel():
                self._late = future
            raise ValueError(
                f"reward {name} gives no answer within the deadline of {self.deadline:g} s"
            ) from error

    def measure(
        self, *batch: list, fps: float, may_end: Callable[[bool], bool] = bool
    ) -> list[Reward]:
        """Score a batch also with the held-out scorers, whose failures make only their own scores
        missing.
        """
        pending = self.submit(batch, fps=fps)
        if not self.held_out_scorers:
            return self.collect([pending], may_end)
        held_out = self.held_out_scorers.submit(batch, fps=fps)
        rewards = self.collect([pending], may_end)
        others = self.held_out_scorers.collect([held_out], may_end)
        reasons = [other.reason for other in others if other.reason]
        if reasons:
            lacking = f"{len(reasons)} of {len(others)} videos lack held-out scores"
            print(f"\n{lacking}; first reason: {reasons[0]}", file=sys.stderr, flush=True)
        return [
            replace(reward, scores=reward.scores | other.scores)
            for reward, other in zip(rewards, others)
        ]

    def check_prompts(self, prompts: Iterable[str], validated: Iterable[str] = ()) -> None:
        """Raise ValueError if a scorer cannot score one of its prompts; held-out scorers see only
        ``validated``.
        """
        scored = [*prompts, *validated]
        for name, scorer in self.scorers.items():
            self.call(name, partial(contract.check_prompts, scorer, scored))
        if self.held_out_scorers:
            self.held_out_scorers.check_prompts(validated)

    def call_all(self, method: str, function: Callable[[str, Scorer], T]) -> dict[str, T | str]:
        """Call ``function(name, scorer)`` for each scorer, also the held-out ones, that has an
        optional method, and return by scorer its result, or the reason of its failure.
        """
        found: dict[str, T | str] = {}
        for name, scorer in self.scorers.items():
            if not hasattr(scorer, method):
                continue
            try:
                found[name] = self.call(name, partial(function, name, scorer))
            except Exception as error:  # a scorer may raise anything
                add_place(error, scorer.__module__)
                found[name] = describe_error(error)
        if self.held_out_scorers:
            found |= self.held_out_scorers.call_all(method, function)
        return found

    def close(self, *, wait: bool = True) -> None:
        if self.held_out_scorers:
            self.held_out_scorers.close(wait=wait)
        self._is_closed = True
        timeout = None if wait and not self._hangs else 0.0
        self._worker.close(timeout)

    def _finished_rewards(self, batch: PendingBatch) -> list[Reward]:
        """Return the rewards; if some are not ready, return them as missing and cancel what has not
        started.
        """
        if batch.rewards.done():
            return batch.rewards.result()
        if not batch.rewards.cancel():
            self._late = batch.rewards
        batch.is_canceled.set()
        finished = list(batch.finished)
        reason = f"no reward within the deadline of {self.deadline:g} s"
        return finished + [Reward(math.nan, {}, reason)] * (batch.num_videos - len(finished))

    @property
    def _hangs(self) -> bool:
        return self._late is not None and not self._late.done()

    def _in_stream(self) -> AbstractContextManager:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _score_in_stream(
        self, batches: list[Batch], fps: float, finished: list[Reward], is_canceled: threading.Event
    ) -> list[Reward]:
        start = time.perf_counter()
        try:
            with self._in_stream(), self.on_device():
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
        results = [ScoreResult({}, reason) for reason in reasons]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        if not rows:
            return [self._reward(result) for result in results]
        for name, scorer in self.scorers.items():
            new = score_safely(
                scorer,
                [videos[i] for i in rows],
                [prompts[i] for i in rows],
                fps=fps,
                retries=self.retries,
            )
            for row, result in zip(rows, new):
                reason = results[row].reason or (result.reason and f"{name}: {result.reason}")
                scores = self.names.renamed(name, result.scores)
                twice = sorted(scores.keys() & results[row].scores.keys())
                if reason is None and twice:
                    reason = (
                        f"{name}: another scorer also returns {', '.join(twice)}; declare it in "
                        "`dimensions`"
                    )
                results[row] = ScoreResult(scores | results[row].scores, reason)
        return [
            replace(self._reward(result), asked=(prompt, fps))
            for result, prompt in zip(results, prompts, strict=True)
        ]

    def _reward(self, result: ScoreResult) -> Reward:
        total = weighted_sum(result.scores, self.weights)
        if result.reason:
            return Reward(math.nan, result.scores, result.reason)
        reason = None
        if not math.isfinite(total):
            missing = [
                name
                for name, weight in self.weights.items()
                if weight and not is_finite(result.scores, name)
            ]
            reason = f"no finite score for {', '.join(missing) or 'the weighted sum'}"
        return Reward(total, result.scores, reason)

    def _move(self, device: str | None) -> None:
        """Move the scorers that can be moved; None moves each to its own device."""
        for scorer in self.scorers.values():
            if hasattr(scorer, "move_to"):
                scorer.move_to(device)
        # other streams cannot reuse memory that is cached for this stream
        if device == "cpu" and self._stream:
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
            return [
                score_safely(scorer, [v], [p], fps=fps, retries=0)[0]
                for v, p in zip(videos, prompts)
            ]
    return [ScoreResult({}, describe_error(results))] * len(videos)


def try_score(
    scorer: Scorer, videos: list[Tensor], prompts: list[str], *, fps: float
) -> list[ScoreResult] | Exception:
    """Return the result of each video, or the error if the scorer raised one or returned something
    unusable.
    """
    # Any exception of a scorer becomes the reason for a missing reward and does not stop the run.
    try:
        return contract.score(scorer, videos, prompts, fps=fps)
    except Exception as error:
        add_place(error, scorer.__module__)
        # the traceback's frames hold memory that the next attempt may need
        return error.with_traceback(None)
