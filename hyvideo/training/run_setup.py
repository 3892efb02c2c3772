"""Construction of the parts of a run from its settings, with checks before any weights are read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hyvideo.data.digests import digest_of
from hyvideo.data.prompts import Request
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.collectives import (
    agree,
    all_objects,
    raise_on_all_ranks,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.attention_kernels import Choice
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.planning.disk import check_room
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.rewards.rewards import Scorer
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import BUILT_IN, objective_class
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import RecordSettings
from hyvideo.training.compile_probe import match_gradient_mode
from hyvideo.training.cost import Cost
from hyvideo.training.custom_objective import try_objective
from hyvideo.training.input_digests import PAIRS, SERVICE, digest_inputs, digest_ratings
from hyvideo.training.model_setup import (
    check_adapter,
    check_checkpoint,
    choose_attention,
    load_encoder,
    make_pipeline,
    negative_condition,
    precompute_conditions,
    try_encoders,
    vae_identity,
)
from hyvideo.training.objective import Objective
from hyvideo.training.pair_collector import HeldOutPairs, PairCollector, PairLabels
from hyvideo.training.pair_latents import PairLatents
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.preemption import PreemptionSignals
from hyvideo.training.reward_gradient import RewardGradient, WithRewardGradient, try_gradient
from hyvideo.training.rewards import (
    GroupRewards,
    make_async_scorer,
    reward_digests,
    service_identity,
    try_held_out,
    try_scorers,
)
from hyvideo.training.rollout_batch import RolloutNoise
from hyvideo.training.rollout_collector import RolloutCollector
from hyvideo.training.rollout_records import RolloutRecorder
from hyvideo.training.run_state import Progress, RunState


@dataclass(frozen=True)
class Run:
    """The parts of a run; made in `build_run`."""

    inputs: RunInputs  # settings, prompts, plan of an iteration and architecture
    planned_run: PlannedRun  # predicted memory and cost
    attention: Choice  # attention kernel, and why others were rejected
    scorer: AsyncScorer  # rewards of videos, in the background
    encoder: ConditionEncoder  # prompts -> conditions
    policy: Policy  # trained transformer, with anchor, EMA and optimizers
    pipeline: GRPOPipeline  # sampling, replay and decoding
    signals: PreemptionSignals  # that stop the run
    cost: Cost  # forward passes and FLOPs of an iteration
    objective: Objective  # what an update trains on, and its loss
    collector: RolloutCollector | PairCollector  # rollouts of an iteration, or rated pairs
    rewards: GroupRewards | PairLabels  # advantages within groups, or answers
    held_out: HeldOutPairs | None  # rated pairs that are not trained
    recorder: RolloutRecorder  # scores and videos of rollouts
    update: PolicyUpdate  # gradients and optimizer steps
    checkpoints: CheckpointWriter
    state: RunState  # contents of a checkpoint


def build_run(
    config: Config,  # with absolute paths
    mesh: Mesh,
    device: torch.device,
    *,
    progress: Progress,
    check_owner: Callable[[], None],  # raises NotOwner on the main rank
    run_id: str,  # identity of the run, which marks its folders
    recorded: Config,  # the settings as given, for checkpoints
    scorers: dict[str, Scorer] | None = None,  # by name; default: created from the settings
) -> Run:
    """Check the settings, load the models and return the parts of the run.

    Raises ValueError for unusable checkpoints or prompts before any weights are read. Collective.
    """
    inputs = RunInputs(config, mesh.world_size)
    plan = inputs.plan
    agree_on_sampler(config.sampling, mesh)
    objective_type = objective_class(config.objective.name)
    schedule = config.sampling.schedule()
    requests = inputs.requests
    kinds = _check_models(config, inputs)
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        digests = digest_inputs(config, inputs, kinds)
    pair_latents = None
    if config.objective.uses_pairs:
        pair_latents = PairLatents(
            Path(config.record.output_dir),
            inputs.preferences.videos,
            vae_identity=vae_identity(config.model),
        )
        digests[PAIRS] = digest_of(digest_ratings(inputs.ratings), pair_latents.contents)
    planned_run = PlannedRun(config, mesh.world_size, inputs.architecture)
    with raise_on_all_ranks(mesh):
        if mesh.is_main:
            check_room(planned_run)
    attention = choose_attention(
        config.model,
        device,
        tokens=inputs.architecture.image_tokens(*config.sampling.size),
        sp_size=mesh.sp_size,
        gather=partial(all_objects, mesh=mesh),
    )

    progress.enter("load", "the reward model")
    if config.objective.scores_rollouts and scorers is None:
        with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
            digests |= reward_digests(config)
    scorer = _load_scorer(config, device, inputs, scorers)
    service = service_identity(scorer)
    if service:
        digests[SERVICE] = service
    agree("the digest of", digests, mesh)

    progress.enter("load", "the text encoders and the VAE")
    encoded = inputs.prompts + config.negative_requests
    encoder, vae = load_encoder(config, device)
    if config.model.precompute_conditions:
        sized = [
            (encoded, config.sampling.size),
            (inputs.validated, config.validation_sampling.size),
        ]
        precompute_conditions(encoder, sized, mesh, on_stage=progress.enter)
    else:
        try_encoders(encoder, encoded, config.sampling.size)
    if pair_latents:
        _encode_pairs(pair_latents, config, vae, mesh, progress)
    negative = negative_condition(config.negative_requests, encoder, device)

    progress.enter("load", "the transformer")
    policy = Policy(config, mesh, device, encoded if config.num_branches == 2 else requests)
    pipeline = make_pipeline(
        config.sampling,
        config.model.dtype,
        policy.transformer,
        vae,
        negative,
        is_batched=config.rollout.batched_forward == "true",
    )
    # Other objectives tolerate rounding.
    if config.distributed.enable_compile == "true" and objective_type.has_ratio:
        progress.enter("load", "compiled blocks")
        _probe_compiled_blocks(config, mesh, device, pipeline, encoder, schedule, requests[0])
    signals = PreemptionSignals(mesh)
    pipeline.with_progress = partial(progress.steps, check=signals.check)
    for size in dict.fromkeys(config.video_sizes.values()):
        pipeline.try_decoding(*size, batch_size=config.rollout.decode_batch_size)

    cost = Cost(planned_run, counts_flops=device.type == "cuda")
    shape = pipeline.latent_shape(*config.sampling.size)
    objective = objective_type(
        config,
        mesh,
        pipeline,
        policy,
        noise=RolloutNoise(config.data.seed, shape, config.rollout.use_same_noise),
        num_updates=plan.updates,
        cost=cost,
        on_stage=progress.enter,
        check=signals.check,
    )
    if config.objective.name not in BUILT_IN:
        progress.enter("load", "the objective")
        condition = encoder([requests[0]], height=config.data.height, width=config.data.width)
        with raise_on_all_ranks(mesh):
            try_objective(
                objective,
                schedule,
                condition.to(device),
                num_columns=plan.num_trained_steps,
                dimensions=scorer.weights,
            )
    if config.objective.reward_weight:
        reward_gradient = _reward_gradient(config, pipeline, scorer, requests)
        objective = WithRewardGradient(objective, reward_gradient)
    held_out = None
    record = config.record
    if pair_latents:
        collector = PairCollector(
            config,
            mesh,
            pipeline,
            encoder,
            inputs.preferences,
            pair_latents,
            objective,
            plan=plan,
            schedule=schedule,
            cost=cost,
            check=signals.check,
        )
        rewards = PairLabels()
        held_out = HeldOutPairs(collector)
        record = record.model_copy(update={"log_video_interval": 0})  # no videos are sampled
    else:
        collector = RolloutCollector(
            config,
            mesh,
            pipeline,
            encoder,
            scorer,
            requests,
            objective,
            plan=plan,
            schedule=schedule,
            cost=cost,
            check=signals.check,
        )
        rewards = GroupRewards(
            config.reward,
            scorer,
            mesh,
            group_size=config.rollout.num_generations,
            num_rollouts=plan.rollouts,
        )
    recorder = RolloutRecorder(
        record,
        config.data,
        mesh,
        group_size=config.rollout.num_generations,
        num_rollouts=plan.rollouts,
        run_id=run_id,
    )
    update = PolicyUpdate(
        config,
        mesh,
        policy,
        objective,
        device=device,
        num_updates=plan.updates,
        cost=cost,
        on_stage=progress.enter,
        check=signals.check,
    )
    checkpoints = _checkpoint_writer(
        config.record,
        mesh,
        check_owner,
        run_id,
        timeout=config.distributed.collective_timeout,
    )
    state = RunState(
        recorded,
        policy,
        update,
        checkpoints,
        progress,
        num_rollouts=plan.rollouts,
        inputs=digests,
    )
    return Run(
        inputs=inputs,
        planned_run=planned_run,
        attention=attention,
        scorer=scorer,
        encoder=encoder,
        policy=policy,
        pipeline=pipeline,
        signals=signals,
        cost=cost,
        objective=objective,
        collector=collector,
        rewards=rewards,
        held_out=held_out,
        recorder=recorder,
        update=update,
        checkpoints=checkpoints,
        state=state,
    )


def agree_on_sampler(sampling: Sampling, mesh: Mesh) -> None:
    """Raise ValueError if ranks have other steps of a custom sampler, such as of a function that
    reads the rank. Collective.
    """
    if ".py:" in sampling.sampler:
        steps = dict(enumerate(sampling.transitions(), 1))
        agree(f"sde_type {sampling.sampler} in step", steps, mesh)


def _check_models(config: Config, inputs: RunInputs) -> frozenset[str]:
    """Raise ValueError if the checkpoint or the adapter does not fit the settings and prompts;
    return the kinds of conditions that the prompts need.
    """
    sources = {
        "pairs_csv" if config.objective.uses_pairs else "prompts_csv": inputs.prompts,
        "valid_video_csv": inputs.validated,
    }
    kinds = check_checkpoint(config, sources, list(config.video_sizes.values()))
    check_adapter(config.model, config.optimizer)
    return kinds


def _encode_pairs(
    pair_latents: PairLatents, config: Config, vae: nn.Module, mesh: Mesh, progress: Progress
) -> None:
    """Encode the rated videos that have no stored latents. Collective."""
    _, height, width = config.sampling.size
    pair_latents.encode(
        vae,
        mesh,
        size=(height, width),
        on_stage=progress.enter,
    )


def _probe_compiled_blocks(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    pipeline: GRPOPipeline,
    encoder: ConditionEncoder,
    schedule: Schedule,
    request: Request,
) -> None:
    """Let rollouts run the compiled graphs of training if the others round differently."""
    conditions = encoder([request], height=config.data.height, width=config.data.width)
    match_gradient_mode(
        pipeline,
        schedule,
        conditions.to(device),
        config.sampling.size,
        mesh,
        batch_size=config.rows_per_pass,
    )


def _checkpoint_writer(
    settings: RecordSettings,
    mesh: Mesh,
    check_owner: Callable[[], None],
    run_id: str,
    *,
    timeout: float,
) -> CheckpointWriter:
    return CheckpointWriter(
        Path(settings.output_dir),
        mesh,
        keep=settings.save_total_limit,
        keep_every=settings.keep_every,
        is_asynchronous=settings.save_asynchronously,
        timeout=timeout,
        check_owner=check_owner,
        run=run_id,
    )


def _load_scorer(
    config: Config, device: torch.device, inputs: RunInputs, given: dict[str, Scorer] | None
) -> AsyncScorer:
    """Return the rewards of the run, after a check of its prompts and a trial on one video."""
    requests, validated = inputs.requests, inputs.validated
    is_scored = config.objective.scores_rollouts or bool(validated)
    scorer = make_async_scorer(config, device, given if is_scored else {})
    scored = requests if config.objective.scores_rollouts else []
    scorer.check_prompts(
        [request.prompt for request in scored], [request.prompt for request in validated]
    )
    if config.reward.check_reward and given is None and is_scored:
        _try_rewards(scorer, config, requests, validated)
    return scorer


def _reward_gradient(
    config: Config, pipeline: GRPOPipeline, scorer: AsyncScorer, requests: list[Request]
) -> RewardGradient:
    """Return the gradient of the rewards, after a trial of its scorers on one video."""
    reward_gradient = RewardGradient(
        pipeline, scorer, fps=config.data.fps, batch_size=config.rollout.decode_batch_size
    )
    if not config.reward.ignore_rewards:
        try_gradient(reward_gradient, config.data, requests[0].prompt)
    return reward_gradient


def _try_rewards(
    scorer: AsyncScorer, config: Config, requests: list[Request], validated: list[Request]
) -> None:
    """Check the scorers, also of held-out metrics, on a video of the run's size."""
    try_scorers(scorer, config.data, requests[0].prompt)
    if scorer.held_out_scorers:
        try_scorers(scorer.held_out_scorers, config.data, validated[0].prompt)
    if validated:
        try_held_out(scorer, config.data, validated[0].prompt)
