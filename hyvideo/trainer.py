"""SAGE-GRPO: rollouts, rewards, advantages, a clipped loss in a trust region, update, moving anchor.

    prompts -> conditions -> rollouts -> videos -> rewards -> advantages -> anchor means -> updates -> checkpoint

Every stage is a method, in this order. The mathematics is in ``grpo`` and ``schedulers``.
"""

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.config.run_plan import make_plan
from hyvideo.config.settings import Config
from hyvideo.data.prompts import PromptOrder, Request, read_requests
from hyvideo.distributed import checkpoint
from hyvideo.distributed.checkpoint import CheckpointWriter
from hyvideo.distributed.collectives import barrier, gather_objects, merge_rows, share_reason
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.validation import Validation
from hyvideo.grpo.advantages import group_advantages
from hyvideo.grpo.metrics import DIMENSIONS, reward_metrics
from hyvideo.models.lora import save_lora
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward, Scorer
from hyvideo.pipelines.conditions import Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Trajectories
from hyvideo.records.metrics import MetricsWriter, ProgressBar
from hyvideo.records.run_files import StageTimer, evenly_spaced, peak_memory_gib, write_config
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.training.model_setup import (
    RequiredEncoders,
    check_checkpoint,
    empty_condition,
    load_encoder,
    make_pipeline,
)
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdates
from hyvideo.training.preemption import PreemptionSignals, Stopped
from hyvideo.training.rewards import make_async_scorer, refuse_too_many_missing, try_scorers
from hyvideo.training.rollout_batch import (
    RolloutBatch,
    RolloutIndex,
    initial_noise,
    places_of_replica,
    step_noise,
    timestep_permutations,
)
from hyvideo.training.rollout_records import keep_round
from hyvideo.training.run_state import contents, differences, refuse_changes
from hyvideo.training.saved_policy import LORA_FOLDER, write_model_file
from hyvideo.training.spool import Spool

# Of state.json, to go on with.
STATE = {"iteration": int, "update": int, "anchor_age": int, "kl_coefficient": dict, "health": dict, "settings": dict}


class Trainer:
    """One training run on this process's share of the rollouts.

    Args:
        config: Checked settings (``plan.check``).
        scorers: The rewards by name; by default those that the settings name.
        on_stage: Is told every stage that the run comes to, and every part of a long one, with the iteration.

    Raises: ValueError for checkpoints or prompts that cannot be used, before any weights are read.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        *,
        scorers: dict[str, Scorer] | None = None,
        on_stage: Callable[[str, int], None] = lambda stage, iteration: None,
    ):
        self.config, self.mesh, self.device = config, mesh, device
        self.iteration, self.on_stage = 0, on_stage
        self._enter("load")
        self.plan = make_plan(config, mesh.world_size)
        self.output_dir = Path(config.record.output_dir)
        self.requests, self.contents = read_requests(config.data.prompts_csv), contents(config)
        self.order = PromptOrder(len(self.requests), self.plan.groups, config.data.seed)
        validated = read_requests(config.data.valid_video_csv) if config.data.valid_video_csv else []
        rollout_size = (config.data.height, config.data.width)
        validation_size = (
            config.record.validation_height or config.data.height,
            config.record.validation_width or config.data.width,
        )
        sizes = [rollout_size, validation_size] if validated else [rollout_size]
        check_checkpoint(config, RequiredEncoders.of(self.requests + validated), sizes)
        self.judge: AsyncScorer = make_async_scorer(config, device, scorers)
        self.dimensions = tuple(dict.fromkeys((*DIMENSIONS, *config.reward_weights)))
        self.judge.check_prompts([request.prompt for request in self.requests + validated])
        if config.reward.check_reward and scorers is None:
            try_scorers(config, self.judge, self.requests[0].prompt)
        self.encoder, vae = load_encoder(config, device)
        if config.model.precompute_conditions:
            self._precompute_conditions([(self.requests, *rollout_size), (validated, *validation_size)])
        unconditional = empty_condition(config, self.encoder, device)
        anchor_moves = config.anchor_moves if config.needs_anchor else None
        self.policy = Policy(config, mesh, device, RequiredEncoders.of(self.requests), anchor_moves=anchor_moves)
        self.pipeline = make_pipeline(config, self.policy.transformer, vae, unconditional)
        self.latent_shape = self.pipeline.latent_shape(
            config.data.sample_n_frames, config.data.height, config.data.width
        )
        sampler = {"eta": config.rollout.eta, "sde_type": config.rollout.sde_type}
        self.stochastic_steps = self.pipeline.scheduler.stochastic_steps(**sampler)
        self.window = parse_window(config.rollout.sde_window, len(self.stochastic_steps))
        self.updates = PolicyUpdates(config, mesh, device, self.pipeline, self.policy, self._enter)
        self.checkpoints = CheckpointWriter(
            self.output_dir,
            mesh,
            keep=config.record.save_total_limit,
            keep_every=config.record.keep_every,
            is_asynchronous=config.record.save_asynchronously,
            timeout=config.distributed.collective_timeout,
        )
        self.validation = None
        if config.data.valid_video_csv:
            self.validation = Validation(config, mesh, self.pipeline, self.encoder, self.judge, self._enter)
        self.saved_iteration = 0
        self.stop = PreemptionSignals(mesh)
        self.changed_settings: list[str] = []  # since the checkpoint that this run goes on from
        self.resumed = self._resume()
        if self.resumed and self.iteration >= config.optimizer.max_steps:
            raise ValueError(
                f"max_steps must be above the iteration to resume after, got {config.optimizer.max_steps} and "
                f"{self.iteration}; raise max_steps"
            )

    # --- the run ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains to ``max_steps`` iterations and leaves everything in ``output_dir``.

        Raises: RewardHacking where a validation shows it and ``on_reward_hacking`` ends the run; Stopped after a
            signal, once everything is saved.
        """
        config = self.config
        writer = None
        if self.mesh.is_main:
            writer = self._metrics_writer()  # first: it refuses a folder that it cannot go on in
            if config.record.resume_from_checkpoint:
                checkpoint.drop_after(self.output_dir, self.iteration)
            write_config(self.output_dir, config, self.device, self.mesh.world_size)
        if self.validation and self.iteration == 0:
            self._validate()
            if config.record.on_reward_hacking == "rollback":
                self.save()  # there is something to go back to from the start
        with (
            self.stop,
            writer or nullcontext(),
            ProgressBar(config.optimizer.max_steps, initial=self.iteration) if writer else nullcontext() as bar,
        ):
            while self.iteration < config.optimizer.max_steps:
                self.iteration += 1
                try:
                    metrics = self.run_iteration(writer)
                except Stopped:
                    self._leave()
                    raise
                self.checkpoints.check()
                if self._is_due(config.record.validation_interval) and self.validation:
                    metrics |= self._validate()
                if writer:
                    writer.log(metrics, self.iteration)
                    bar.update(metrics)
                self._end_if_hacked()
                if self._is_due(config.record.save_interval):
                    self.save()
            self.checkpoints.wait()
        self._enter("end")
        if self.checkpoints.last_failed:
            raise OSError(f"the checkpoint of iteration {self.iteration} could not be written; earlier ones are kept")

    def _leave(self) -> None:
        """Saves the run as it was after its last finished iteration; rollouts of the one begun are in the spool."""
        self.iteration -= 1
        self.checkpoints.wait()
        if self.iteration > self.saved_iteration or self.checkpoints.last_failed:
            self.save()
        self.checkpoints.wait()

    def run_iteration(self, writer: MetricsWriter | None = None) -> dict[str, float]:
        """One round of rollouts and its training; gives the metrics of layout.md."""
        timer = StageTimer(self.device, self._enter)
        self.updates.cost.forwards = 0
        round_, videos, pending = self.sample_round(timer)
        with timer("anchor"):  # while the last rewards are computed
            anchor_means = self.updates.anchor_means(round_)
        with timer("reward"):
            rewards = dict(zip(videos, self.judge.collect(pending)))
        self.stop.check()
        advantages, reward_metrics = self.advantages(round_.places, rewards)
        round_ = dataclasses.replace(round_, rewards=rewards, advantages=advantages)
        with timer("record"):
            self._keep_videos(round_, videos, reward_metrics, writer)
        self.refuse_too_many_missing(reward_metrics, rewards)
        with timer("update"):
            update_metrics = self.updates.train(round_, anchor_means, self.iteration)
        self.spool.forget()
        return {
            "iteration": self.iteration,
            "update": self.updates.update_count,
            **reward_metrics,
            **update_metrics,
            "anchor/age": self.policy.anchor.age if self.policy.anchor else 0,
            "cost/forwards": self.updates.cost.forwards / len(round_.places),
            **timer.metrics(),
            "time/scoring": self.judge.take_times().scoring,
            "memory/peak_gib": peak_memory_gib(self.device),
        }

    def sample_round(self, timer: StageTimer):
        """This iteration's round without advantages, its videos by row, and their pending rewards."""
        steps = self._steps_with_noise()
        places = self._places()
        requests = self._requests(places)
        with timer("conditions"):
            size = {"height": self.config.data.height, "width": self.config.data.width}
            conditions = self.encoder(requests, **size).to(self.device)
        prompts = [request.prompt for request in requests]
        rollout, videos, pending = self._sample_and_submit(places, conditions, prompts, timer)
        visits = timestep_permutations(self.config, self.iteration, places, steps, self.plan.trained_steps)
        return RolloutBatch(places, prompts, conditions, rollout, visits), videos, pending

    def _steps_with_noise(self) -> list[int]:
        """Of this iteration; the others become steps of the ODE."""
        if self.window is None:
            return self.stochastic_steps
        steps = self.window.steps(self.stochastic_steps, self.config.data.seed, self.iteration)
        self.pipeline.scheduler.restrict_noise(steps)
        self.updates.refresh_step_weights()
        return steps

    def _places(self) -> list[RolloutIndex]:
        """Of this replica's rollouts in the round."""
        batches = range(self.config.rollout.gradient_accumulation_steps)
        return [place for batch in batches for place in places_of_replica(self.config, self.mesh, batch)]

    def _requests(self, places: list[RolloutIndex]) -> list[Request]:
        indices = self.order.indices(self.iteration)
        return [self.requests[indices[place.group]] for place in places]

    def _sample_and_submit(
        self, places: list[RolloutIndex], conditions: Conditions, prompts: list[str], timer: StageTimer
    ):
        """Rollouts, videos by row and their pending rewards: a batch is scored while the next is sampled.

        Ranks that share a batch by sequence parallelism share its videos too: each decodes and scores some.
        """
        size = self.config.rollout.batch_size
        spool = self.spool = Spool(
            self.config, self.mesh, self.iteration, self.policy.trained, self.device, self.contents
        )
        parts, pending = [], []
        videos: dict[int, Tensor | None] = {}
        for batch, start in enumerate(range(0, len(places), size)):
            self.stop.check()
            rows = list(range(start, min(start + size, len(places))))
            with timer("rollout"):
                parts.append(self._spooled_or_sampled(spool, batch, [places[row] for row in rows], conditions, rows))
            own = self.mesh.own_share(rows)
            if not own:
                continue
            with timer("decode"):
                latents = parts[-1].final[[row - start for row in own]]
                decoded = self.pipeline.decode(latents, batch_size=self.config.rollout.decode_batch_size)
            pending.append(self._submit(spool, batch, decoded, [prompts[row] for row in own]))
            videos |= zip(own, decoded)
        return Trajectories.cat(parts), videos, pending

    def _spooled_or_sampled(
        self, spool: Spool, batch: int, places: list[RolloutIndex], conditions: Conditions, rows: list[int]
    ) -> Trajectories:
        # Of those found in the spool too: the run has paid for them, in an iteration that left no metrics.
        self.updates.cost.forwards += len(places) * self.updates.branches * self.config.rollout.grpo_sampling_steps
        found = spool.rollout(batch)
        if found is None:
            found = self.sample(places, conditions.select(rows))
            spool.keep_rollout(batch, found)
        return found

    def _submit(self, spool: Spool, batch: int, videos: list[Tensor | None], prompts: list[str]) -> Future:
        """The rewards of a batch, known from before the run was interrupted or on their way."""
        known = spool.rewards(batch)
        if known is not None:
            done: Future = Future()
            done.set_result(known)
            return done
        rewards = self.judge.submit(videos, prompts, fps=self.config.data.fps)
        rewards.add_done_callback(lambda scored: spool.keep_rewards(batch, scored.result()))
        return rewards

    def _precompute_conditions(self, wanted: list[tuple[list[Request], int, int]]) -> None:
        """Encodes every request of the run into the store, a share on each rank, and lets the encoders go."""
        for requests, height, width in wanted:
            for request in requests[self.mesh.rank :: self.mesh.world_size]:
                self.encoder([request], height=height, width=width)
        if self.config.num_branches == 2 and self.mesh.is_main:
            self.encoder([Request("")])
        self.encoder.release()
        barrier(self.mesh)

    # --- rollout ------------------------------------------------------------------------------------------------

    def sample(self, places: list[RolloutIndex], conditions: Conditions) -> Trajectories:
        """A batch of rollouts; noise is drawn for each rollout, never per batch."""
        noise = self._stack_noise([initial_noise(self.config, self.iteration, p, self.latent_shape) for p in places])

        def draw(step: int) -> Tensor:
            shape = self.latent_shape
            return self._stack_noise([step_noise(self.config, self.iteration, p, step, shape) for p in places])

        return self.pipeline.sample(conditions, noise, draw)

    def advantages(self, places: list[RolloutIndex], rewards: dict[int, Reward]) -> tuple[Tensor, dict[str, float]]:
        """Advantages of this replica's rollouts (rollouts,), normalised over the whole groups of all replicas.

        Args:
            rewards: Of the rollouts that this rank has scored, by row of ``places``.
        """
        group_size = self.config.rollout.num_generations
        numbers = [place.group * group_size + place.member for place in places]
        own = {
            numbers[row]: [reward.total, *(reward.scores.get(name, math.nan) for name in self.dimensions)]
            for row, reward in rewards.items()
        }
        in_order = merge_rows(own, self.plan.rollouts, 1 + len(self.dimensions), self.mesh)
        advantages = group_advantages(in_order[:, 0], group_size, clip=self.config.reward.advantage_clip)
        metrics = reward_metrics(in_order, advantages, group_size, self.dimensions)
        return advantages[numbers].float().to(self.device), metrics

    def refuse_too_many_missing(self, metrics: dict[str, float], rewards: dict[int, Reward]) -> None:
        """Raises RuntimeError on every rank when more rewards are missing than the settings allow."""
        own = next((reward.reason for reward in rewards.values() if reward.reason), None)
        reason = share_reason(own, self.mesh) if metrics["reward/missing"] else None
        refuse_too_many_missing(self.config, metrics, reason, self.plan.rollouts, self.iteration)

    # --- records ----------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Begins to write a checkpoint of the run as it stands; every rank calls it."""
        self._enter("save")
        anchor = self.policy.anchor
        state = {
            "iteration": self.iteration,
            "update": self.updates.update_count,
            "anchor_age": anchor.age if anchor else 0,
            "kl_coefficient": self.updates.kl_coefficient.state_dict(),
            "health": self.updates.health.state_dict(),
            "rollouts": self.plan.rollouts,
            "settings": self.config.flat(),
            "contents": self.contents,
        }
        lora = None
        if self.policy.is_lora:
            with self.policy.as_average():
                lora = self.policy.lora()

        def write_files(folder: Path) -> None:
            write_model_file(self.policy.transformer, folder)
            if lora:
                save_lora(lora, folder / LORA_FOLDER)

        self.saved_iteration = self.iteration
        return self.checkpoints.save(self.iteration, self.policy.tensors(), state, write_files)

    def _resume(self) -> bool:
        """Takes up the checkpoint that the settings name; claims that there was one."""
        wanted = self.config.record.resume_from_checkpoint
        folder = checkpoint.find_undamaged(self.output_dir, wanted, self.mesh) if wanted else None
        if folder is None:
            return False
        state = checkpoint.read_state(folder, needed=STATE)
        found = differences(
            state["settings"],
            self.config,
            saved_rollouts=state.get("rollouts"),
            rollouts=self.plan.rollouts,
            saved_contents=state.get("contents", {}),
        )
        if not self.config.record.allow_changed_settings:
            refuse_changes(found)
        self.changed_settings = found.free + found.of_the_method
        self.policy.load(folder, state["anchor_age"])
        self.updates.kl_coefficient.load_state_dict(state["kl_coefficient"])
        self.updates.health.load_state_dict(state["health"])
        self.iteration = self.saved_iteration = state["iteration"]
        self.updates.update_count = state["update"]
        return True

    def _validate(self) -> dict[str, float]:
        self._enter("validation")
        with self.policy.as_average():
            measures = self.validation.run(self.iteration)
        self.judge.take_times()  # are of no iteration
        return measures

    def _end_if_hacked(self) -> None:
        """Raises RewardHacking, on all ranks alike, where the last validation showed it and the settings say so."""
        if not self.validation or not self.validation.watch.ends_run:
            return
        saved = self.save() if self.config.record.on_reward_hacking == "stop" else None
        self.checkpoints.wait()
        self.validation.watch.end(saved)

    def _metrics_writer(self) -> MetricsWriter:
        config = self.config
        # -1 starts over: the run died before its first checkpoint.
        before_any_checkpoint = -1 if config.record.resume_from_checkpoint else None
        return MetricsWriter(
            self.output_dir,
            report_to=[name for name in config.record.report_to if name != "none"],
            run_name=self.output_dir.name,
            config=config.flat(),
            resume_iteration=self.iteration if self.resumed else before_any_checkpoint,
        )

    def _keep_videos(
        self,
        round_: RolloutBatch,
        videos: dict[int, Tensor | None],
        metrics: dict[str, float],
        writer: MetricsWriter | None,
    ) -> None:
        """Every so often, and when a reward is missing, some videos and all scores go to rollouts/<iteration>/."""
        interval = self.config.record.log_video_interval
        is_due = interval and self.iteration % interval == 0
        if not interval or not (is_due or metrics["reward/missing"]):
            return
        folder = self.output_dir / "rollouts" / f"{self.iteration:06d}"
        limit = self.config.record.log_num_videos if is_due else 0
        wanted = set(evenly_spaced(limit, self.plan.rollouts))
        names = keep_round(self.config, folder, round_, videos, wanted, lambda own: gather_objects(own, self.mesh))
        for row, name in names.items() if writer else ():
            writer.add_video(f"rollout/{row}", videos[row], self.config.data.fps, self.iteration, file=folder / name)

    def _enter(self, stage: str) -> None:
        self.on_stage(stage, self.iteration)

    def _is_due(self, interval: int) -> bool:
        return self.iteration % interval == 0 or self.iteration == self.config.optimizer.max_steps

    def _stack_noise(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).to(self.device, non_blocking=True)
