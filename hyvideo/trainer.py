"""SAGE-GRPO: rollouts, rewards, advantages, a clipped loss in a trust region, update, moving anchor.

    prompts -> conditions -> rollouts -> videos -> rewards -> advantages -> anchor means -> updates -> checkpoint

Every stage is a method, in this order. The mathematics is in ``grpo`` and ``schedulers``.
"""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.anchor import Anchor
from hyvideo.components import Needs, check_checkpoint, load_encoder, load_pipeline
from hyvideo.config import Config
from hyvideo.data import PromptOrder, Request, read_requests
from hyvideo.distributed import checkpoint
from hyvideo.distributed.collectives import (
    average_gradients,
    barrier,
    gather_objects,
    gather_replicas,
    sum_over_replicas,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.advantages import group_advantages
from hyvideo.grpo.loss import clipped_policy_loss
from hyvideo.grpo.trust_region import KLCoefficient, KLScheduleSettings, kl_weights, position_kl, velocity_kl
from hyvideo.metrics import MetricsWriter, ProgressBar
from hyvideo.models.reward_models.judge import Judge
from hyvideo.models.reward_models.rewards import Reward, Scorer
from hyvideo.optimizers import learning_rate, make_optimizer
from hyvideo.pipelines.conditioning import Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout
from hyvideo.plan import make_plan, needs_anchor
from hyvideo.records import StageTimer, peak_memory_gib, write_config
from hyvideo.rewarding import make_judge, refuse_too_many_missing, try_scorers
from hyvideo.rollouts import Place, Round, initial_noise, places_of_replica, step_noise, visiting_orders
from hyvideo.round_metrics import DIMENSIONS, SUMMED, Terms, UpdateResult, average, reward_metrics
from hyvideo.round_records import keep_round
from hyvideo.validation import Validation


class Trainer:
    """One training run on this process's share of the rollouts.

    Args:
        config: Checked settings (``plan.check``).
        scorers: The rewards by name; by default those that the settings name.

    Raises: ValueError for checkpoints or prompts that cannot be used, before any weights are read.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, *, scorers: dict[str, Scorer] | None = None):
        self.config, self.mesh, self.device = config, mesh, device
        self.plan = make_plan(config, mesh.world_size)
        self.output_dir = Path(config.record.output_dir)
        self.requests = read_requests(config.data.prompts_csv)
        self.order = PromptOrder(len(self.requests), self.plan.groups, config.data.seed)
        validated = read_requests(config.data.valid_video_csv) if config.data.valid_video_csv else []
        rollout_size = (config.data.height, config.data.width)
        validation_size = (
            config.record.validation_height or config.data.height,
            config.record.validation_width or config.data.width,
        )
        sizes = [rollout_size, validation_size] if validated else [rollout_size]
        check_checkpoint(config, Needs.of(self.requests + validated), sizes)
        self.judge: Judge = make_judge(config, device, scorers)
        self.dimensions = tuple(dict.fromkeys((*DIMENSIONS, *config.reward_weights)))
        self.judge.check_prompts([request.prompt for request in self.requests + validated])
        if config.reward.check_reward and scorers is None:
            try_scorers(config, self.judge, self.requests[0].prompt)
        self.encoder, vae = load_encoder(config, device)
        if config.model.precompute_conditions:
            self._precompute_conditions([(self.requests, *rollout_size), (validated, *validation_size)])
        self.pipeline = load_pipeline(config, device, encoder=self.encoder, vae=vae, trained=Needs.of(self.requests))
        self.policy: nn.Module = self.pipeline.transformer
        self.latent_shape = self.pipeline.latent_shape(
            config.data.sample_n_frames, config.data.height, config.data.width
        )
        self.trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(config.optimizer, self.trained)

        sampler = {"eta": config.rollout.eta, "sde_type": config.rollout.sde_type}
        scheduler = self.pipeline.scheduler
        self.stochastic_steps = scheduler.stochastic_steps(**sampler)
        balancing = scheduler.compute_grad_balancing_factors(**sampler)
        self.step_weights = (balancing if config.loss.use_grad_balancing else (balancing > 0).float()).to(device)

        settings = config.trust_region
        self.kl_weights = kl_weights(
            config.kl_strategy,
            dual_position=settings.dual_kl_moving_weight,
            dual_velocity=settings.dual_kl_step_weight,
        )
        self.kl_coefficient = KLCoefficient(_kl_schedule(config))
        self.anchor: Anchor | None = None
        if needs_anchor(config):
            every = settings.update_ref_model_step if self.kl_weights.anchor_moves else None
            self.anchor = Anchor(self.policy, refresh_every=every, offload=settings.reference_mode_offload)
        self.validation = None
        if config.data.valid_video_csv:
            self.validation = Validation(config, mesh, self.pipeline, self.encoder, self.judge)
        self.iteration = 0
        self.update_count = 0
        self.forwards = 0  # transformer evaluations of this iteration, on this replica
        self.resumed = self._resume()
        if self.resumed and self.iteration >= config.optimizer.max_steps:
            raise ValueError(
                f"max_steps must be above the iteration to resume after, got {config.optimizer.max_steps} and "
                f"{self.iteration}; raise max_steps"
            )

    # --- the run ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains to ``max_steps`` iterations and leaves everything in ``output_dir``."""
        config = self.config
        writer = None
        if self.mesh.is_main:
            writer = self._metrics_writer()  # first: it refuses a folder that it cannot go on in
            if config.record.resume_from_checkpoint:
                checkpoint.drop_after(self.output_dir, self.iteration)
            write_config(self.output_dir, config, self.device, self.mesh.world_size)
        if self.validation and self.iteration == 0:
            self.validation.run(0)
        with (
            writer or nullcontext(),
            ProgressBar(config.optimizer.max_steps, initial=self.iteration) if writer else nullcontext() as bar,
        ):
            while self.iteration < config.optimizer.max_steps:
                self.iteration += 1
                metrics = self.run_iteration(writer)
                if self._is_due(config.record.validation_interval) and self.validation:
                    metrics |= self.validation.run(self.iteration)
                if writer:
                    writer.log(metrics, self.iteration)
                    bar.update(metrics)
                if self._is_due(config.record.save_interval) and self.mesh.is_main:
                    self.save()

    def run_iteration(self, writer: MetricsWriter | None = None) -> dict[str, float]:
        """One round of rollouts and its training; gives the metrics of layout.md."""
        timer = StageTimer(self.device)
        self.forwards = 0
        places = self._places()
        requests = self._requests(places)
        with timer("conditions"):
            size = {"height": self.config.data.height, "width": self.config.data.width}
            conditions = self.encoder(requests, **size).to(self.device)
        prompts = [request.prompt for request in requests]
        rollout, videos, pending = self._sample_and_submit(places, conditions, prompts, timer)
        visits = visiting_orders(self.config, self.iteration, places, self.stochastic_steps, self.plan.trained_steps)
        round_ = Round(places, prompts, conditions, rollout, visits)
        with timer("anchor"):  # while the last rewards are computed
            anchor_means = self.anchor_means(round_)
        with timer("reward"):
            rewards = self.judge.collect(pending)
        advantages, reward_metrics = self.advantages(rewards)
        round_ = dataclasses.replace(round_, rewards=rewards, advantages=advantages)
        with timer("record"):
            self._keep_videos(round_, videos, reward_metrics, writer)
        refuse_too_many_missing(self.config, reward_metrics, rewards, self.plan.rollouts, self.iteration)
        with timer("update"):
            update_metrics = self.update(round_, anchor_means)
        return {
            "iteration": self.iteration,
            "update": self.update_count,
            **reward_metrics,
            **update_metrics,
            "anchor/age": self.anchor.age if self.anchor else 0,
            "cost/forwards": self.forwards / len(places),
            **timer.metrics(),
            "time/scoring": self.judge.take_times().scoring,
            "memory/peak_gib": peak_memory_gib(self.device),
        }

    def _places(self) -> list[Place]:
        """Of this replica's rollouts in the round."""
        batches = range(self.config.rollout.gradient_accumulation_steps)
        return [place for batch in batches for place in places_of_replica(self.config, self.mesh, batch)]

    def _requests(self, places: list[Place]) -> list[Request]:
        indices = self.order.indices(self.iteration)
        return [self.requests[indices[place.group]] for place in places]

    def _sample_and_submit(self, places: list[Place], conditions: Conditions, prompts: list[str], timer: StageTimer):
        """Rollouts, their videos and their pending rewards: a batch is scored while the next is sampled."""
        size = self.config.rollout.batch_size
        parts, videos, pending = [], [], []
        for start in range(0, len(places), size):
            rows = list(range(start, min(start + size, len(places))))
            with timer("rollout"):
                parts.append(self.sample([places[row] for row in rows], conditions.select(rows)))
            with timer("decode"):
                decoded = self.pipeline.decode(parts[-1].final, batch_size=self.config.rollout.decode_batch_size)
            pending.append(self.judge.submit(decoded, [prompts[row] for row in rows], fps=self.config.data.fps))
            videos += decoded
        return Rollout.cat(parts), videos, pending

    def _precompute_conditions(self, wanted: list[tuple[list[Request], int, int]]) -> None:
        """Encodes every request of the run into the store, a share on each rank, and lets the encoders go."""
        for requests, height, width in wanted:
            for request in requests[self.mesh.rank :: self.mesh.world_size]:
                self.encoder([request], height=height, width=width)
        if self.config.rollout.cfg_scale > 1 and self.mesh.is_main:
            self.encoder([Request("")])
        self.encoder.release()
        barrier(self.mesh)

    # --- rollout ------------------------------------------------------------------------------------------------

    def sample(self, places: list[Place], conditions: Conditions) -> Rollout:
        """A batch of rollouts; noise is drawn for each rollout, never per batch."""
        noise = self._stack_noise([initial_noise(self.config, self.iteration, p, self.latent_shape) for p in places])

        def draw(step: int) -> Tensor:
            shape = self.latent_shape
            return self._stack_noise([step_noise(self.config, self.iteration, p, step, shape) for p in places])

        self.forwards += len(places) * self._branches * self.config.rollout.grpo_sampling_steps
        return self.pipeline.sample(conditions, noise, draw)

    def advantages(self, rewards: list[Reward]) -> tuple[Tensor, dict[str, float]]:
        """Advantages of this replica's rollouts (rollouts,), normalised over the whole groups of all replicas."""
        own = torch.tensor(
            [[reward.total, *(reward.scores.get(name, math.nan) for name in self.dimensions)] for reward in rewards],
            dtype=torch.float64,
        )
        batches, size = self.config.rollout.gradient_accumulation_steps, self.config.rollout.batch_size
        everyone = gather_replicas(own.flatten(), self.mesh).view(self.mesh.num_replicas, batches, size, -1)
        in_order = everyone.transpose(0, 1).flatten(0, 2)  # (rollouts of the round, 1 + dimensions)
        group_size = self.config.rollout.num_generations
        advantages = group_advantages(in_order[:, 0], group_size, clip=self.config.reward.advantage_clip)
        by_replica = advantages.view(batches, self.mesh.num_replicas, size)
        own_advantages = by_replica[:, self.mesh.replica].flatten().float()
        return own_advantages.to(self.device), reward_metrics(in_order, advantages, group_size, self.dimensions)

    # --- trust region ---------------------------------------------------------------------------------------------

    def anchor_means(self, round_: Round) -> Tensor | None:
        """The anchor's means at the visited transitions, or None where they are not needed or not needed yet.

        An anchor that equals the rollout policy has the rollout's means: no forward is made for them.
        Shape: (rollouts, trained steps, channels, frames, height, width).
        """
        if self.anchor is None:
            return None
        index = torch.arange(len(round_.places))[:, None]
        if self.anchor.equals_policy:
            return round_.rollout.means[index, round_.visits]
        if self.config.trust_region.kl_compute_mode == "training_phase":
            return None
        means = torch.zeros_like(round_.rollout.means[index, round_.visits])
        with self.anchor as model:
            for rows in _chunks(list(range(len(round_.places))), self.config.loss.mini_batch_size_per_update):
                for visit in range(round_.visits.shape[1]):
                    means[rows, visit] = self._anchor_mean(round_, rows, visit, model)
        return means

    @torch.no_grad()
    def _anchor_mean(self, round_: Round, rows: list[int], visit: int, model: nn.Module) -> Tensor:
        self.forwards += self._branches * len(rows)
        return self._replay(round_, rows, visit, transformer=model).prev_sample_mean

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, round_: Round, anchor_means: Tensor | None) -> dict[str, float]:
        """The round's optimizer updates; gives their metrics, averaged over the terms they trained on."""
        num_updates = self.plan.updates
        counts = self._scored_rollouts_per_update(round_)
        results = []
        uses_anchor = self.anchor is not None and anchor_means is None
        with self.anchor if uses_anchor else nullcontext() as anchor_model:
            for update in range(num_updates):
                if counts[update] == 0:  # every reward of its groups is missing, on all ranks
                    continue
                rows = round_.rows_of_update(update, num_updates, self.iteration)
                results.append(self._one_update(round_, rows, counts[update], anchor_means, anchor_model))
        if self.anchor:
            self.anchor.after_round(self.policy)
        return average(results)

    def _one_update(
        self,
        round_: Round,
        rows: list[int],
        num_rollouts: int,
        anchor_means: Tensor | None,
        anchor_model: nn.Module | None,
    ) -> UpdateResult:
        """Gradients accumulated over all rollouts and visited steps, then one step of the optimizer."""
        num_visits = round_.visits.shape[1]
        num_terms = num_rollouts * num_visits
        sums = torch.zeros(len(SUMMED), dtype=torch.float64, device=self.device)
        largest = torch.zeros((), device=self.device)
        for chunk in _chunks(rows, self.config.loss.mini_batch_size_per_update):
            for visit in range(num_visits):
                anchor_mean = None
                if anchor_means is not None:
                    anchor_mean = anchor_means[chunk, visit]
                elif anchor_model is not None:
                    anchor_mean = self._anchor_mean(round_, chunk, visit, anchor_model)
                terms = self._terms(round_, chunk, visit, anchor_mean)
                # Gradients are averaged over the replicas, terms are not: hence the factor.
                (terms.loss.sum() * self.mesh.num_replicas / num_terms).backward()
                sums += terms.sums
                largest = torch.maximum(largest, terms.largest_deviation)
        recompute = self.config.distributed.enable_gradient_checkpointing
        self.forwards += len(rows) * num_visits * self._branches * (4 if recompute else 3)

        used = {"kl/coef": self.kl_coefficient.value, "lr": learning_rate(self.config.optimizer, self.update_count)}
        grad_norm = self._step_optimizer(used["lr"])
        sums = sum_over_replicas(sums, self.mesh) / num_terms
        largest = gather_replicas(largest[None], self.mesh).amax()
        metrics = (
            dict(zip(SUMMED, sums.tolist()))
            | used
            | {
                "policy/ratio_max_deviation": largest.item(),
                "grad/norm": grad_norm,
            }
        )
        if self.anchor is None:
            metrics["kl/position"] = math.nan  # not measured
        self.kl_coefficient.observe(metrics.pop("kl/total"))
        if self.anchor:
            self.anchor.after_update()
        return UpdateResult(metrics, num_terms)

    def _terms(self, round_: Round, rows: list[int], visit: int, anchor_mean: Tensor | None) -> Terms:
        """Loss and metrics of one training forward: each row at the step of its ``visit``-th visit."""
        steps = round_.visits[rows, visit]
        step = self._replay(round_, rows, visit)
        old_log_prob = round_.rollout.log_probs[rows, steps]
        policy = clipped_policy_loss(
            step.log_prob,
            old_log_prob,
            round_.advantages[rows],
            self.step_weights[steps.to(self.device)],
            clip_range=self.config.loss.clip_range,
        )
        velocity = velocity_kl(step.log_prob, old_log_prob)
        if self.config.trust_region.kl_velocity == "gaussian":
            velocity = position_kl(step.prev_sample_mean, round_.rollout.means[rows, steps], step.std_dev_t)
        position = torch.zeros_like(velocity)
        if anchor_mean is not None:
            position = position_kl(step.prev_sample_mean, anchor_mean, step.std_dev_t)
        kl = self.kl_weights.position * position + self.kl_weights.velocity * velocity
        loss = policy.terms + self.kl_coefficient.value * kl
        summed = (
            policy.terms,
            loss,
            position,
            velocity,
            kl,
            policy.ratio,
            policy.is_clipped,
            step.log_prob,
        )
        sums = torch.stack([term.detach().double().sum() for term in summed])
        return Terms(loss, sums, (policy.ratio - 1).abs().amax())

    def _replay(self, round_: Round, rows: list[int], visit: int, *, transformer: nn.Module | None = None):
        """The visited transition of each row, under the policy or another transformer."""
        steps = round_.visits[rows, visit]
        latents = round_.rollout.latents
        return self.pipeline.replay(
            latents[rows, steps],
            latents[rows, steps + 1],
            self.pipeline.scheduler.timesteps[steps],
            round_.conditions.select(rows),
            transformer=transformer,
        )

    def _step_optimizer(self, rate: float) -> float:
        """Averages and clips the gradients and applies them; gives their norm before clipping."""
        average_gradients(self.trained, self.mesh)
        grad_norm = nn.utils.clip_grad_norm_(self.trained, self.config.optimizer.max_grad_norm).item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of iteration {self.iteration} is not finite; the policy was not changed. "
                "Lower learning_rate, or look at the rollouts of this iteration"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.update_count += 1
        return grad_norm

    def _scored_rollouts_per_update(self, round_: Round) -> list[int]:
        """Rollouts that each update trains on, over all replicas: every rank divides by the same number."""
        updates = range(self.plan.updates)
        own = [len(round_.rows_of_update(update, self.plan.updates, self.iteration)) for update in updates]
        return sum_over_replicas(torch.tensor(own), self.mesh).tolist()

    # --- records ----------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Writes a checkpoint of the run as it stands."""
        state = {
            "iteration": self.iteration,
            "update": self.update_count,
            "anchor_age": self.anchor.age if self.anchor else 0,
            "kl_coefficient": self.kl_coefficient.state_dict(),
            "settings": self.config.flat(),
        }
        differs = self.anchor is not None and not self.anchor.equals_policy
        training = checkpoint.TrainingState(
            state, self.optimizer.state_dict(), self.anchor.state_dict() if differs else None
        )
        keep = self.config.record.save_total_limit
        return checkpoint.save(self.output_dir, self.iteration, self.policy, training, keep=keep)

    def _resume(self) -> bool:
        """Takes up the checkpoint that the settings name; claims that there was one."""
        wanted = self.config.record.resume_from_checkpoint
        folder = checkpoint.find(self.output_dir, wanted) if wanted else None
        if folder is None:
            return False
        checkpoint.load_policy(self.policy, folder)
        training = checkpoint.load(folder, self.device)
        self.optimizer.load_state_dict(training.optimizer)
        self.kl_coefficient.load_state_dict(training.state["kl_coefficient"])
        self.iteration, self.update_count = training.state["iteration"], training.state["update"]
        if self.anchor:
            anchor = self.policy.state_dict() if training.anchor is None else training.anchor
            self.anchor.load_state_dict(anchor, training.state["anchor_age"])
        return True

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
        self, round_: Round, videos: list[Tensor | None], metrics: dict[str, float], writer: MetricsWriter | None
    ) -> None:
        """Every so often, and when a reward is missing, some videos and all scores go to rollouts/<iteration>/."""
        interval = self.config.record.log_video_interval
        is_due = interval and self.iteration % interval == 0
        if not interval or not (is_due or metrics["reward/missing"]):
            return
        folder = self.output_dir / "rollouts" / f"{self.iteration:06d}"
        limit = self.config.record.log_num_videos if is_due else 0
        names = keep_round(self.config, folder, round_, videos, limit, lambda own: gather_objects(own, self.mesh))
        for row, name in names.items() if writer else ():
            writer.add_video(f"rollout/{row}", videos[row], self.config.data.fps, self.iteration, file=folder / name)

    def _is_due(self, interval: int) -> bool:
        return self.iteration % interval == 0 or self.iteration == self.config.optimizer.max_steps

    def _stack_noise(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).to(self.device, non_blocking=True)

    @property
    def _branches(self) -> int:
        return 2 if self.config.rollout.cfg_scale > 1 else 1


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _kl_schedule(config: Config) -> KLScheduleSettings:
    settings = config.trust_region
    if config.kl_strategy == "none":
        return KLScheduleSettings(schedule="constant", minimum=0.0, maximum=0.0)
    return KLScheduleSettings(
        schedule=settings.kl_schedule,
        feedback=settings.kl_feedback,
        initial=settings.kl_coef,
        minimum=settings.kl_min_coef,
        maximum=settings.kl_weight,
        warmup_updates=settings.kl_warmup_updates,
        window=settings.kl_window,
        gain=settings.kl_gain,
        target=settings.kl_weight if settings.kl_target is None else settings.kl_target,
    )
