"""Training loop of SAGE-GRPO (arXiv:2603.21872).

`training/iteration.py` is one iteration of Algorithm 1; this file is the loop around it: resume,
iterations, validations, checkpoints, and the end of the run.
"""

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from hyvideo.checkpoints.format import complete, remove_checkpoints_after
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.files import optional
from hyvideo.files.run_folder import (
    FINISHED,
    RECORD,
    STOPPED,
    Lease,
    NotOwner,
    RunRecord,
    remove_after,
    update_record,
    write_record,
)
from hyvideo.files.text import describe_error
from hyvideo.loading.machine import resolve_auto
from hyvideo.planning.hardware import hardware_of_device
from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.progress_bar import ProgressBar
from hyvideo.records.run_config import write_config
from hyvideo.records.stage_timer import StageTimer
from hyvideo.records.timeline import write_timeline
from hyvideo.records.trackers import check_login
from hyvideo.report.page import REPORT_FILE, write_report
from hyvideo.rewards.rewards import Scorer
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.training.iteration import train_iteration
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.output_folder import find_start
from hyvideo.training.preemption import PreemptionSignals, Stopped
from hyvideo.training.progress import Progress
from hyvideo.training.rewards import TooManyMissingRewards
from hyvideo.training.run_setup import build_run
from hyvideo.training.run_state import check_changes
from hyvideo.validation import reward_hacking
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
        self.progress = Progress(PreemptionSignals(mesh), on_stage, self.bar.stage)
        self.progress.enter("load")
        self.is_report_named = False
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
                self.progress,
                self.lease,
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
                    self.progress.signals.all_ready,
                    trained_on=self.run.source.requests,
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
    def _lacks_line(self) -> bool:
        """True if the run continues in its folder, and ended before the metrics of its last
        iteration, or their validation, were written.
        """
        start = self.start
        if start.state is None or start.state.run != start.run:  # of another run
            return False
        return start.state.iteration not in start.recorded

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
        return state.iteration in self.start.recorded

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

        A run that a signal, missing rewards or the on-policy check ends saves its last finished
        iteration. Raises Stopped after a signal, RewardHacking, NotOwner, TooManyMissingRewards,
        OffPolicyError, and any error of a part of the run.
        """
        end = FINISHED
        try:
            self._check_owner()  # again, before the first write
            with self.bar.begin(self.iteration):
                self._train()
        except Stopped:
            end = STOPPED
            raise
        except BaseException as error:
            end = describe_error(error)
            raise
        finally:
            if self.mesh.is_main:
                self._end(end)
        self.progress.enter("end")
        self._require_checkpoint()

    def _require_checkpoint(self) -> None:
        """Raise OSError if the last checkpoint could not be written."""
        if self.run.state.checkpoints.last_failed:
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
        with raise_on_all_ranks(self.mesh, errors=(NotOwner, ValueError, OSError)):
            writer = self._open_records() if self.mesh.is_main else None
        self.run.recorder.writer = writer
        with self.progress.signals, writer or nullcontext():
            try:
                self._train_until(self.config.optimizer.max_steps, writer)
            # the first must not write, the second has saved
            except (NotOwner, reward_hacking.RewardHacking):
                raise
            except BaseException as error:  # also sys.exit in code of a scorer
                self._save_after(error)
                raise
            self.run.state.checkpoints.wait()
            self._write_timeline()  # with the end of the last checkpoint
            self._report()  # with the last checkpoint

    def _train_until(self, max_steps: int, writer: MetricsWriter | None) -> None:
        """Train the iterations of Algorithm 1 (arXiv:2603.21872), each with its checkpoint first,
        then its validation, and then its metrics: the checkpoint has the metrics for a run that is
        killed before they are written.
        """
        self.begin = time.perf_counter()
        if self.validation and self.iteration == 0 and self.config.validation.validate_at_step0:
            self.validate()
            self._report()
        if self._lacks_line:
            self._finish_iteration(writer)
        while self.iteration < max_steps:
            self.iteration += 1
            metrics = self.run_iteration()
            self.run.state.mark_finished(metrics)
            self._save_if_due()
            self._finish_iteration(writer)

    def run_iteration(self) -> dict[str, float]:
        """Train one iteration and return its metrics by name."""
        self._start_timer()
        metrics = train_iteration(self.run, self.iteration)
        scoring = sum(end - start for start, end in self.run.scorer.spans)
        return metrics | self.timer.metrics() | {"time/scoring": scoring} | self.timer.memory()

    def _save_if_due(self) -> None:
        self._check_owner()
        self.run.state.checkpoints.check()
        if self._is_due(self.config.record.save_interval) or self.run.state.is_save_due():
            with self.progress.timed("save"):
                self.run.state.save()

    def _finish_iteration(self, writer: MetricsWriter | None) -> None:
        """Validate the policy if that is due, and write the metrics of the iteration."""
        is_due = self._is_due(self.config.validation.validation_interval)
        metrics = self.run.state.metrics
        metrics = metrics | {"time/since_start": time.perf_counter() - self.begin}
        if is_due and (self.validation or self.run.objective.held_out_levels):
            metrics |= self.validate()
            metrics |= self.timer.memory()  # now with that of the validation
            self._check_owner()  # a validation may take long
        if writer:
            if self.iteration == 1 and self.validation and (base := self.validation.measures(0)):
                writer.log({f"validation/{name}": value for name, value in base.items()}, 0)
            writer.log(metrics, self.iteration)
            self.bar.update(metrics)
        if is_due:
            self._report()
        self._write_timeline()
        if self.validation and self.validation.verdict.ends_run:  # the same on all ranks
            folder = self.run.state.save()  # unless it is saved
            self.run.state.checkpoints.wait()
            failed = self.run.state.checkpoints.last_failed
            saved = None if failed else folder
            reward_hacking.stop(self.validation.verdict, self.output_dir, saved, self.mesh)

    def _save_after(self, error: BaseException) -> None:
        """Save the last finished iteration after an error that all ranks raise together; after any
        other one, in which the other ranks may wait in a collective, say where this rank ends.
        """
        self.run.scorer.close(wait=False)
        if not isinstance(error, (Stopped, TooManyMissingRewards, OffPolicyError)):
            if self.mesh.world_size > 1:
                sys.stderr.write(
                    f"\nrank {self.mesh.rank} ({socket.gethostname()}) ends in stage "
                    f"{self.progress.stage} of iteration {self.iteration}: {type(error).__name__}\n"
                )
            return
        saved = self.run.state.save_last_finished()
        if self.mesh.is_main and saved is None:
            print(
                "\nthe last finished iteration cannot be saved: an optimizer step of the next one "
                "has already changed the weights",
                file=sys.stderr,
                flush=True,
            )
        if isinstance(error, Stopped):
            self._require_checkpoint()  # exit code 75 says that it is saved

    def validate(self) -> dict[str, float]:
        """Validate the EMA weights if the run keeps them, else the policy, and return the
        metrics.
        """
        metrics: dict[str, float] = {}
        with self.progress.timed("validation"), self.run.policy.with_ema_weights():
            if self.validation:
                metrics |= self.validation.run(self.iteration)
            if self.run.objective.held_out_levels:
                source = self.run.source
                count = len(source.examples.held_out)
                metrics |= self.run.objective.measure(source.held_out(), count)
        return metrics

    @property
    def timer(self) -> StageTimer:
        """Timer of the current iteration."""
        return self.progress.timer

    def _start_timer(self) -> None:
        """Start the times of an iteration, whose timeline also has the checkpoint and the
        validation after it.
        """
        self.run.scorer.spans.clear()
        cost = self.run.objective.cost
        has_peak = self.device.type == "cuda" and self.config.model.dtype != "fp32"
        peak = 0.0
        if has_peak:
            peak = hardware_of_device(torch.cuda.get_device_name(self.device), 0.0).peak
        self.progress.timer = StageTimer(
            self.device, self.progress.enter, flops=lambda: cost.flops, peak=peak
        )

    def _write_timeline(self) -> None:
        if self.mesh.is_main:
            background = {
                "scoring": self.run.scorer.spans,
                "writing": self.run.state.checkpoints.spans,
            }
            spans = [(stage, span) for stage, spans in background.items() for span in spans]
            write_timeline(
                self.output_dir, self.iteration, self.timer.start, self.timer.spans() + spans
            )

    def _report(self) -> None:
        if self.mesh.is_main and self.config.record.report:
            self._write_timeline()
            with optional(REPORT_FILE, (Exception,)):  # a page must not end a run
                write_report([self.output_dir], self.output_dir / REPORT_FILE)
                if not self.is_report_named:
                    place = Path(self.recorded.record.output_dir) / REPORT_FILE
                    self.bar.say(f"report: {place}, which grows with every validation")
                    self.is_report_named = True

    def _open_records(self) -> MetricsWriter:
        """Return the metrics writer, positioned at the resumed iteration, after writing
        config.yaml.
        """
        record = self.config.record
        self._write_record()
        last_line = None
        if self._lacks_line:
            # The line of this iteration is written again; that of iteration 1 with the line of the
            # base model (0).
            last_line = self.iteration - 1 or -1
        elif self.resumed:
            last_line = self.iteration
        elif self.start.record:  # a run that starts over
            last_line = -1
        writer = MetricsWriter(
            self.output_dir,
            report_to=[name for name in record.report_to if name != "none"],
            run_name=self.output_dir.name,
            config=self.recorded.flat(),
            resume_iteration=last_line,
            audited_iteration=self.iteration if self.resumed else last_line,
        )
        remove_after(self.output_dir, self.iteration, self.start.run)
        remove_checkpoints_after(self.output_dir, self.iteration, self.start.run)
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
