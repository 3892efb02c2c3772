"""Training loop of SAGE-GRPO (arXiv:2603.21872).

Stages of an iteration and the files that implement them:

1. Prompts, one for each group of rollouts                       training/rollout_collector.py
2. Rollouts with an SDE whose variance is the exact integral     schedulers/transitions.py,
   over a step (SAGE), and their log-probabilities               pipelines/
3. Rewards of the decoded videos, in the background              rewards/scoring.py
4. Advantages within each group                                  grpo/advantages.py
5. Clipped policy loss, each step weighted by the equalizer      training/objectives/grpo.py,
   (SAGE)                                                        grpo/
6. Trust region: KL to a moving anchor and to the rollout        grpo/trust_region.py,
   policy, with an adaptive coefficient (SAGE)                   training/anchor.py
7. Gradients over all rollouts and steps, one optimizer step     training/policy_update.py
8. Anchor refresh every ``update_ref_model_step`` updates (SAGE) training/anchor.py
"""

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from hyvideo.data.files import optional
from hyvideo.data.run_folder import (
    RECORD,
    Lease,
    NotOwner,
    RunRecord,
    remove_after,
    update_record,
    write_record,
)
from hyvideo.data.text import describe_error
from hyvideo.distributed.checkpoint_loading import complete
from hyvideo.distributed.collectives import all_arrive, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.planning.hardware import hardware_of_device
from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.progress_bar import ProgressBar
from hyvideo.records.run_files import write_config
from hyvideo.records.stage_timer import StageTimer, peak_memory_gib, write_timeline
from hyvideo.records.trackers import check_login
from hyvideo.report.page import REPORT_FILE, write_report
from hyvideo.rewards.rewards import Reward, Scorer
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.training.custom_objective import forbid_changes
from hyvideo.training.machine import resolve_auto
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.output_folder import find_start
from hyvideo.training.preemption import Stopped
from hyvideo.training.rewards import TooManyMissingRewards
from hyvideo.training.rollout_batch import RolloutBatch
from hyvideo.training.rollout_collector import PendingRewards
from hyvideo.training.run_setup import build_run
from hyvideo.training.run_state import Progress, check_changes
from hyvideo.validation.reward_hacking.rule import RewardHacking
from hyvideo.validation.validation import Validation


class Finished(Exception):
    """The run in the output folder has reached ``max_steps``."""


class Trainer:
    """Trains the policy on this process's share of the rollouts.

    It owns ``output_dir`` until `train` returns or the process exits. Raises ValueError for
    unusable checkpoints or prompts before any weights are read, and NotOwner if another process
    owns ``output_dir``.
    """

    def __init__(
        self,
        config: Config,  # checked by ``config.rules.check``
        mesh: Mesh,
        device: torch.device,
        *,
        scorers: dict[str, Scorer] | None = None,  # by name; default: created from the settings
        # called at the start of a stage
        on_stage: Callable[[str, int], None] = lambda stage, iteration: None,
    ):
        self.recorded = resolve_auto(config, mesh, device)  # with the paths as given
        self.config = config = self.recorded.with_absolute_paths()
        self.mesh = mesh
        self.device = device
        self.output_dir = Path(config.record.output_dir)
        self.bar = ProgressBar(config.optimizer.max_steps, is_shown=mesh.is_main)
        self.progress = Progress(on_stage, self.bar.stage)
        self.progress.enter("load")
        self.lease = Lease(self.output_dir)  # of the main rank
        with ExitStack() as on_error:
            # first, so that no other process can write a newer checkpoint
            with raise_on_all_ranks(mesh, errors=(NotOwner, ValueError, OSError)):
                if mesh.is_main:
                    on_error.enter_context(self.lease)
            self.start = find_start(self.output_dir, config.record.resume_from_checkpoint, mesh)
            if self._is_finished():
                raise Finished(f"the run in {self.output_dir} is finished")
            with raise_on_all_ranks(mesh):
                if mesh.is_main:
                    check_login(config.record.report_to)
            self.run = build_run(
                config,
                mesh,
                device,
                progress=self.progress,
                check_owner=self.lease.check,
                run_id=self.start.run,
                recorded=self.recorded,
                scorers=scorers,
            )
            self._start_timer()  # for the validation of the base model
            self.validation = None
            if config.data.valid_video_csv:
                self.validation = Validation(
                    config,
                    mesh,
                    self.run.pipeline,
                    self.run.encoder,
                    self.run.scorer,
                    self.run.inputs.validated,
                    self.progress.enter,
                    self.run.signals.all_ready,
                    trained_on=self.run.collector.requests,
                    run_id=self.start.run,
                )
            self._resume()
            on_error.pop_all()

    def _resume(self) -> None:
        """Load the checkpoint, if the run starts from one.

        Raises ValueError if the run has other settings or inputs. Collective.
        """
        start, state = self.start, self.run.state
        if start.checkpoint:
            state.resume(start.checkpoint, start.state)
            if self.iteration in start.recorded:  # a line is written after the validation
                state.unvalidated = {}
        elif start.record and any(start.recorded):
            # The run ended before its first checkpoint. Its iterations are removed only if they are
            # trained again.
            check_changes(
                start.record.settings,
                start.record.inputs,
                self.recorded.flat(),
                state.inputs,
                same_rollouts=True,
            )

    @property
    def resumed(self) -> bool:
        """True if the run starts from a checkpoint."""
        return self.start.checkpoint is not None

    def _is_finished(self) -> bool:
        """Return whether the run in the folder has reached ``max_steps``, with its validation.

        Raises ValueError, before models are loaded, if its settings differ.
        """
        state = self.start.state
        if state is None:
            return False
        num_rollouts = make_plan(self.config, self.mesh.world_size).rollouts
        check_changes(
            state.settings,
            {},  # digests of inputs are compared when all are read
            self.recorded.flat(),
            {},
            same_rollouts=state.rollouts == num_rollouts,
        )
        max_steps = self.config.optimizer.max_steps
        if state.iteration < max_steps:
            return False
        if not self.start.record:
            raise ValueError(
                "max_steps must be greater than the iteration of the checkpoint: got "
                f"max_steps={max_steps} and iteration {state.iteration}; increase max_steps"
            )
        return not state.unvalidated or state.iteration in self.start.recorded

    def _check_owner(self) -> None:
        """Raise NotOwner on all ranks if another process has taken the folder. Collective."""
        with raise_on_all_ranks(self.mesh, errors=(NotOwner,)):
            if self.mesh.is_main:
                self.lease.check()

    @property
    def iteration(self) -> int:
        """Current iteration, or the last finished one between iterations; 0 before the first."""
        return self.progress.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.progress.iteration = iteration

    def train(self) -> None:
        """Train until iteration ``max_steps`` and write all results to ``output_dir``.

        A run that ends early saves its last finished iteration, after any error that all ranks have
        in common. Raises Stopped after a signal, RewardHacking, NotOwner, TooManyMissingRewards,
        OffPolicyError, and any error of a part of the run.
        """
        end = "finished"
        try:
            self._check_owner()  # again, before the first write
            with self.bar.begin(self.iteration):
                self._train()
        except BaseException as error:
            end = describe_error(error)
            raise
        finally:
            if self.mesh.is_main:
                self._end(end)
        self.progress.enter("end")
        if self.run.checkpoints.last_failed:
            raise OSError(
                f"could not write the checkpoint of iteration {self.iteration}; earlier "
                "checkpoints are kept"
            )

    def _end(self, end: str) -> None:
        """Record how the run has ended, and give up the lease."""
        try:
            self.lease.check()
            update_record(self.output_dir, end=end)
        except (NotOwner, OSError, ValueError) as error:
            print(f"\n{RECORD} NOT WRITTEN ({error})", file=sys.stderr, flush=True)
        self.lease.__exit__()

    def _train(self) -> None:
        max_steps, started = self.config.optimizer.max_steps, time.perf_counter()
        with raise_on_all_ranks(self.mesh, errors=(NotOwner, ValueError, OSError)):
            writer = self._open_records() if self.mesh.is_main else None
        with self.run.signals, writer or nullcontext():
            try:
                if self.validation and self.iteration == 0 and self.config.record.validate_at_step0:
                    self.validate()
                    self._report()
                # of the resumed iteration, whose validation is missing
                if self.run.state.unvalidated:
                    self._finish_iteration(writer, started)
                while self.iteration < max_steps:
                    self.iteration += 1
                    metrics = self.run_iteration(writer)
                    self.run.state.mark_finished(metrics)
                    self._finish_iteration(writer, started)
            except (NotOwner, RewardHacking):  # the first must not write, the second has saved
                raise
            except BaseException as error:  # also sys.exit in code of a scorer
                self._save_after(error)
                raise
            self.run.checkpoints.wait()
            self._write_timeline()  # with the end of the last checkpoint
            self._report()  # with the last checkpoint

    def _finish_iteration(self, writer: MetricsWriter | None, started: float) -> None:
        """Validate the policy if that is due, write the metrics of the iteration, and save if that
        is due.

        The order keeps one complete line per iteration: it is on disk before a checkpoint without
        the metrics, and a checkpoint that is written earlier, after an error, has the metrics for
        the resumed run.
        """
        self._check_owner()
        self.run.checkpoints.check()
        metrics = self.run.state.unvalidated | {"time/since_start": time.perf_counter() - started}
        if self._is_due(self.config.record.validation_interval) and (
            self.validation or self.run.held_out
        ):
            metrics = metrics | self.validate()
        if writer:
            if self.iteration == 1 and self.validation and (base := self.validation.measures(0)):
                writer.log({f"validation/{name}": value for name, value in base.items()}, 0)
            writer.log(metrics, self.iteration)
            self.bar.update(metrics)
        if self._is_due(self.config.record.validation_interval):
            self._report()
        self.run.state.unvalidated = {}
        if self.validation and self.validation.monitor.ends_run:  # the same on all ranks
            saved = self.run.state.save()
            self.run.checkpoints.wait()
            self.validation.monitor.end(saved)
        if self._is_due(self.config.record.save_interval) or self.run.state.is_save_due():
            with self.timer("save"):
                self.run.state.save()
        self._write_timeline()

    def _save_after(self, error: BaseException) -> None:
        """Save the last finished iteration after an error, if all ranks have one; a failure to do
        so is reported.
        """
        self.run.scorer.close(wait=False)
        # These are raised on all ranks together. After another error, the other ranks may wait in a
        # collective.
        is_common = isinstance(error, (Stopped, TooManyMissingRewards, OffPolicyError))
        if not is_common and self.mesh.world_size > 1:
            sys.stderr.write(
                f"\nrank {self.mesh.rank} ({socket.gethostname()}) ends in stage "
                f"{self.progress.stage} of iteration {self.iteration}: {type(error).__name__}\n"
            )
        if not is_common and not all_arrive(self.mesh):
            return
        saved, problem = None, "an optimizer step of the next one has already changed the weights"
        try:
            saved = self.run.state.save_last_finished()
        except Exception as second:  # the first error must be reported
            problem = describe_error(second)
        if self.mesh.is_main and saved is None:
            print(
                f"\nthe last finished iteration cannot be saved: {problem}",
                file=sys.stderr,
                flush=True,
            )
        elif self.mesh.is_main and saved and not is_common and not self.run.checkpoints.last_failed:
            print(
                f"\niteration {saved} is saved, the last finished one; the same command resumes the run",
                file=sys.stderr,
                flush=True,
            )

    def run_iteration(self, writer: MetricsWriter | None = None) -> dict[str, float]:
        """Run one iteration (rollouts, rewards, advantages, updates) and return its metrics by
        name.
        """
        timer = self._start_timer()
        # Each batch is scored while the next one is sampled, the last one beside the anchor's
        # forward passes. With `score_between_stages`, all are scored before the anchor, while the
        # GPU is otherwise idle.
        rollouts, pending = self.run.collector.collect(self.iteration, timer)
        is_between = self.config.reward.scores_between_stages and self.run.objective.needs_rewards
        rewards = self._wait_for_rewards(pending, timer) if is_between else {}
        # usually the forward passes of the anchor, whose seconds are time/anchor
        with timer("anchor"), forbid_changes(rollouts, self.run.objective):
            reference = self.run.objective.prepare(rollouts)
        if self.run.objective.needs_rewards:
            if not is_between:
                rewards = self._wait_for_rewards(pending, timer)
            rollouts, reward_metrics = self._with_rewards(rollouts, rewards, pending, timer, writer)
        else:
            rollouts = rollouts.with_rewards({}, torch.zeros(len(rollouts), device=self.device))
            reward_metrics = {}
        with timer("update"):
            update_metrics = self.run.update(rollouts, reference, self.iteration)
        return {
            "iteration": self.iteration,
            "update": self.run.update.update_count,
            **reward_metrics,
            **update_metrics,
            "anchor/age": self.run.policy.anchor.age if self.run.policy.anchor else 0,
            "cost/forwards": self.run.cost.forwards / len(rollouts),
            **timer.metrics(),
            "time/scoring": sum(end - start for start, end in self.run.scorer.spans),
            "memory/peak_gib": peak_memory_gib(self.device),
            "memory/peak_reserved_gib": peak_memory_gib(self.device, reserved=True),
        }

    def _with_rewards(
        self,
        rollouts: RolloutBatch,
        rewards: dict[int, Reward],
        pending: PendingRewards,
        timer: StageTimer,
        writer: MetricsWriter | None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the rollouts with rewards and advantages, after recording and checking them, and
        the metrics.
        """
        advantages, metrics = self.run.rewards.advantages(rollouts.indices, rewards)
        rollouts = rollouts.with_rewards(rewards, advantages.to(self.device))
        num_missing = metrics["reward/missing"]
        with timer("record"):
            self.run.recorder.record(
                rollouts, pending.videos, self.iteration, num_missing=num_missing, writer=writer
            )
        divergence = self.run.update.nonfinite.divergence(self.iteration)
        self.run.rewards.check_failed_rewards(
            metrics, rewards, self.iteration, divergence=divergence
        )
        return rollouts, metrics

    def _wait_for_rewards(self, pending: PendingRewards, timer: StageTimer) -> dict[int, Reward]:
        with timer("reward", f"{self.run.inputs.plan.rollouts} videos"):
            return self.run.rewards.wait(pending, self.run.signals.all_ready)

    def validate(self) -> dict[str, float]:
        """Validate the EMA weights if the run keeps them, else the policy, and return the
        metrics.
        """
        metrics: dict[str, float] = {}
        with self.timer("validation"), self.run.policy.with_ema_weights():
            if self.validation:
                metrics |= self.validation.run(self.iteration)
            if self.run.held_out:
                metrics |= self.run.held_out.measure()
        return metrics

    def _start_timer(self) -> StageTimer:
        """Return the timer of an iteration, whose timeline also has the validation and the
        checkpoint after it.
        """
        self.run.scorer.spans.clear()
        has_peak = self.device.type == "cuda" and self.config.model.dtype != "fp32"
        peak = 0.0
        if has_peak:
            peak = hardware_of_device(torch.cuda.get_device_name(self.device), 0.0).peak
        self.timer = StageTimer(
            self.device, self.progress.enter, flops=lambda: self.run.cost.flops, peak=peak
        )
        return self.timer

    def _write_timeline(self) -> None:
        if self.mesh.is_main:
            background = {"scoring": self.run.scorer.spans, "writing": self.run.checkpoints.spans}
            spans = [(stage, span) for stage, spans in background.items() for span in spans]
            write_timeline(
                self.output_dir, self.iteration, self.timer.start, self.timer.spans() + spans
            )

    def _report(self) -> None:
        if self.mesh.is_main and self.config.record.report:
            self._write_timeline()
            with optional(REPORT_FILE, (OSError, ValueError, OverflowError)):
                write_report([self.output_dir], self.output_dir / REPORT_FILE)

    def _open_records(self) -> MetricsWriter:
        """Return the metrics writer, positioned at the resumed iteration, after writing
        config.yaml.
        """
        record = self.config.record
        self._write_record()
        if self.resumed and self.run.state.unvalidated:
            # The line of this iteration is written again; that of iteration 1 with the line of the
            # base model (0).
            last_line = self.iteration - 1 or -1
        elif self.resumed:
            last_line = self.iteration
        elif self.start.record:  # a run that starts over
            last_line = -1
        else:
            last_line = None
        writer = MetricsWriter(
            self.output_dir,
            report_to=[name for name in record.report_to if name != "none"],
            run_name=self.output_dir.name,
            config=self.recorded.flat(),
            resume_iteration=last_line,
        )
        remove_after(self.output_dir, self.iteration, self.start.run)
        write_config(self.output_dir, self.recorded.flat(), self.device, self.mesh.world_size)
        return writer

    def _write_record(self) -> None:
        """Write run.json of this start."""
        before = self.start.record
        checkpoint = self.start.checkpoint
        started_from = before.started_from if before else ""
        if before is None and checkpoint:
            started_from = str(checkpoint)
        record = RunRecord(
            run=self.start.run,
            started_from=started_from,
            settings=self.recorded.flat(),
            inputs=self.run.state.inputs,
            has_checkpoint=bool(complete(self.output_dir)),
        )
        write_record(self.output_dir, record)

    def _is_due(self, interval: int) -> bool:
        return self.iteration % interval == 0 or self.iteration == self.config.optimizer.max_steps
