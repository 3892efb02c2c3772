"""Training loop of SAGE-GRPO (arXiv:2603.21872). Stages of an iteration and the files that implement them:

1. Prompts, one for each group of rollouts                          training/rollout_collector.py
2. Rollouts with an SDE whose variance is the exact integral over
   a step (SAGE), and their log-probabilities                       schedulers/transitions.py, pipelines/
3. Rewards of the decoded videos, in the background                 models/reward_models/async_scorer.py
4. Advantages within each group                                     grpo/advantages.py
5. Clipped policy loss, each step weighted by the equalizer (SAGE)  grpo/loss.py, grpo/equalizer.py
6. Trust region: KL to a moving anchor and to the rollout policy,
   with an adaptive coefficient (SAGE)                              grpo/trust_region.py, training/anchor.py
7. Gradients over all rollouts and steps, then one optimizer step   training/policy_update.py
8. Anchor refresh every ``update_ref_model_step`` updates (SAGE)    training/anchor.py
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from hyvideo.config.memory.hardware import gpu_rates
from hyvideo.config.settings import Config
from hyvideo.distributed import checkpoint
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import NotOwner, Ownership
from hyvideo.evaluation.report.page import REPORT_FILE, write_report
from hyvideo.evaluation.validation import Validation
from hyvideo.models.reward_models.rewards import Reward, Scorer
from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.progress_bar import ProgressBar
from hyvideo.records.run_files import warn_if_unwritable, write_config
from hyvideo.records.stage_timer import StageTimer, peak_memory_gib, write_timeline
from hyvideo.training.machine import resolve_auto
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.preemption import Stopped
from hyvideo.training.rewards import TooManyMissingRewards
from hyvideo.training.rollout_collector import PendingRewards
from hyvideo.training.run_setup import RunParts
from hyvideo.training.run_state import Progress


class Trainer(RunParts):
    """Trains the policy on this process's share of the rollouts.

    It owns ``output_dir`` until `train` returns or the process exits. Raises ValueError for unusable checkpoints or
    prompts before any weights are read, and NotOwner if another process owns ``output_dir``.
    """

    def __init__(
        self,
        config: Config,  # checked by ``config.rules.check``
        mesh: Mesh,
        device: torch.device,
        *,
        scorers: dict[str, Scorer] | None = None,  # by name; default: created from the settings
        on_stage: Callable[[str, int], None] = lambda stage, iteration: None,  # called at the start of a stage
    ):
        config = resolve_auto(config, mesh, device)
        self.config, self.mesh, self.device = config, mesh, device
        self.output_dir = Path(config.record.output_dir)
        self.bar = ProgressBar(config.optimizer.max_steps, is_shown=mesh.is_main)
        self.progress = Progress(on_stage, self.bar.stage)
        self.progress.enter("load")
        self.owner = Ownership(self.output_dir, mesh)
        with ExitStack() as on_error:
            on_error.enter_context(self.owner)  # first, so that no other process can write a newer checkpoint
            super().__init__(config, mesh, device, self.progress, self.owner, scorers)
            self._start_timer()  # for the validation of the base model
            self._resume(config.record.resume_from_checkpoint)
            on_error.pop_all()

    def _resume(self, resume_from: str) -> None:
        self.validation = None
        if self.config.data.valid_video_csv:
            callbacks = self.progress.enter, self.signals.all_ready
            parts = self.config, self.mesh, self.pipeline, self.encoder, self.scorer, *callbacks
            self.validation = Validation(*parts, trained_on=self.collector.requests)
        self._corrupted: list[Path] = []
        search = self.output_dir, resume_from, self.mesh, self._corrupted
        self.resumed = self.state.resume(checkpoint.find_intact(*search) if resume_from else None)

    @property
    def iteration(self) -> int:
        """Current iteration, or the last finished one between iterations; 0 before the first."""
        return self.progress.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.progress.iteration = iteration

    def train(self) -> None:
        """Train until iteration ``max_steps`` and write all results to ``output_dir``.

        A run that ends early saves its last finished iteration. Raises Stopped after a signal, RewardHacking, NotOwner,
        TooManyMissingRewards and OffPolicyError.
        """
        with self.owner, self.bar.begin(self.iteration):  # checks the ownership again before the first write
            self._train()
        self.progress.enter("end")
        if self.checkpoints.last_failed:
            raise OSError(f"could not write the checkpoint of iteration {self.iteration}; earlier checkpoints are kept")

    def _train(self) -> None:
        max_steps, started = self.config.optimizer.max_steps, time.perf_counter()
        with raise_on_all_ranks(self.mesh, errors=(NotOwner, ValueError)):
            writer = self._open_records() if self.mesh.is_main else None
        with self.signals, writer or nullcontext():
            if self.validation and self.iteration == 0 and self.config.record.validate_at_step0:
                self.validate()
                self._report()
            while self.iteration < max_steps or self.state.unvalidated:
                try:
                    if not self.state.unvalidated:
                        self.iteration += 1
                        self.state.unvalidated = self.run_iteration(writer)
                    self.owner.check()
                    self.checkpoints.check()
                    metrics = self.state.unvalidated | {"time/since_start": time.perf_counter() - started}
                    if self._is_due(self.config.record.validation_interval) and self.validation:
                        metrics = metrics | self.validate()
                except (Stopped, TooManyMissingRewards, OffPolicyError):
                    self.scorer.close(wait=False)
                    self.state.save_last_finished()
                    raise
                if writer:
                    if self.iteration == 1 and self.validation and (base := self.validation.measures(0)):
                        writer.log({f"validation/{name}": value for name, value in base.items()}, 0)
                    writer.log(metrics, self.iteration)
                    self.bar.update(metrics)
                if self._is_due(self.config.record.validation_interval):
                    self._report()
                self.state.unvalidated = {}
                if self.validation and self.validation.monitor.ends_run:  # the same on all ranks
                    saved = self.state.save()
                    self.checkpoints.wait()
                    self.validation.monitor.end(saved)
                if self._is_due(self.config.record.save_interval) or self.state.is_save_due():
                    with self.timer("save"):
                        self.state.save()
                self._write_timeline()
            self.checkpoints.wait()
            self._write_timeline()  # with the end of the last checkpoint

    def run_iteration(self, writer: MetricsWriter | None = None) -> dict[str, float]:
        """Run one iteration (rollouts, rewards, advantages, updates) and return its metrics by name."""
        timer = self._start_timer()
        # Each batch is scored while the next one is sampled, the last one beside the anchor's forward passes. With
        # `score_between_stages`, all are scored before the anchor, while the GPU is otherwise idle.
        rollouts, pending = self.collector.collect(self.iteration, timer, keep_means=self.update.needs_means())
        is_between = self.config.reward.scores_between_stages
        rewards = self._wait_for_rewards(pending, timer) if is_between else {}
        with timer("anchor"):
            anchor_means = self.update.anchor_means(rollouts)
        rewards = rewards if is_between else self._wait_for_rewards(pending, timer)
        advantages, reward_metrics = self.rewards.advantages(rollouts.indices, rewards)
        rollouts = rollouts.with_rewards(rewards, advantages.to(self.device))
        num_missing = reward_metrics["reward/missing"]
        with timer("record"):
            self.recorder.record(rollouts, pending.videos, self.iteration, num_missing=num_missing, writer=writer)
        divergence = self.update.nonfinite.divergence(self.iteration)
        self.rewards.check_failed_rewards(reward_metrics, rewards, self.iteration, divergence=divergence)
        with timer("update"):
            update_metrics = self.update(rollouts, anchor_means, self.iteration)
        return {
            "iteration": self.iteration,
            "update": self.update.update_count,
            **reward_metrics,
            **update_metrics,
            "anchor/age": self.policy.anchor.age if self.policy.anchor else 0,
            "cost/forwards": self.cost.forwards / len(rollouts),
            **timer.metrics(),
            "time/scoring": sum(end - start for start, end in self.scorer.spans),
            "memory/peak_gib": peak_memory_gib(self.device),
            "memory/peak_reserved_gib": peak_memory_gib(self.device, reserved=True),
        }

    def _wait_for_rewards(self, pending: PendingRewards, timer: StageTimer) -> dict[int, Reward]:
        with timer("reward", f"{self.plan.rollouts} videos"):
            return self.rewards.wait(pending, self.signals.all_ready)

    def validate(self) -> dict[str, float]:
        """Validate the EMA weights if the run keeps them, else the policy, and return the metrics."""
        with self.timer("validation"), self.policy.with_ema_weights():
            return self.validation.run(self.iteration)

    def _start_timer(self) -> StageTimer:
        """Return the timer of an iteration, whose timeline also has the validation and the checkpoint after it."""
        self.scorer.spans.clear()
        has_peak = self.device.type == "cuda" and self.config.model.dtype != "fp32"
        peak, _ = gpu_rates(torch.cuda.get_device_name(self.device)) if has_peak else (0.0, 0.0)
        self.timer = StageTimer(self.device, self.progress.enter, flops=lambda: self.cost.flops, peak=peak)
        return self.timer

    def _write_timeline(self) -> None:
        if self.mesh.is_main:
            background = {"scoring": self.scorer.spans, "writing": self.checkpoints.spans}
            spans = [(stage, span) for stage, spans in background.items() for span in spans]
            write_timeline(self.output_dir, self.iteration, self.timer.start, self.timer.spans() + spans)

    def _report(self) -> None:
        if self.mesh.is_main and self.config.record.report:
            self._write_timeline()
            with warn_if_unwritable("REPORT", (OSError, ValueError, OverflowError)):
                write_report([self.output_dir], self.output_dir / REPORT_FILE)

    def _open_records(self) -> MetricsWriter:
        """Return the metrics writer, positioned at the resumed iteration, after writing config.yaml."""
        record = self.config.record
        # A previous run that ended before its first checkpoint starts over (-1).
        without_checkpoint = -1 if record.resume_from_checkpoint else None
        writer = MetricsWriter(
            self.output_dir,
            report_to=[name for name in record.report_to if name != "none"],
            run_name=self.output_dir.name,
            config=self.config.flat(),
            resume_iteration=self.iteration - bool(self.state.unvalidated) if self.resumed else without_checkpoint,
        )
        if record.resume_from_checkpoint:
            checkpoint.remove_after(self.output_dir, self.iteration, self._corrupted)
        write_config(self.output_dir, self.config.flat(), self.device, self.mesh.world_size)
        return writer

    def _is_due(self, interval: int) -> bool:
        return self.iteration % interval == 0 or self.iteration == self.config.optimizer.max_steps
