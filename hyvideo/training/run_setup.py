"""Construction of the parts of a run from its settings, with checks before any weights are read."""

from functools import partial
from pathlib import Path

import torch

from hyvideo.checkpoints.writer import CheckpointWriter
from hyvideo.data.prompts import Request
from hyvideo.data.video_files import ClipForm
from hyvideo.distributed.collectives import (
    agree,
    all_objects,
    raise_on_all_ranks,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.custom_code import named_errors
from hyvideo.files.digests import digest_of
from hyvideo.files.run_folder import Lease
from hyvideo.loading.input_digests import digest_inputs
from hyvideo.loading.model_setup import (
    check_adapter,
    check_checkpoint,
    choose_attention,
    load_encoder,
    make_pipeline,
    negative_condition,
    precompute_conditions,
    try_encoders,
    vae_identity,
    vae_weights,
)
from hyvideo.loading.partner import load_partner
from hyvideo.loading.video_latents import VideoLatents
from hyvideo.models.offload import come_back, put
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.planning.disk import check_room
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.rewards.rewards import Scorer
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import objective_class
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.compile_probe import match_gradient_mode
from hyvideo.training.cost import Cost
from hyvideo.training.given_videos import GivenVideos
from hyvideo.training.objective import Objective
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.progress import Progress
from hyvideo.training.reward_gradient import RewardGradient, RewardTerm, try_gradient
from hyvideo.training.rewards import (
    GroupRewards,
    make_async_scorer,
    reward_digests,
    try_scorers,
)
from hyvideo.training.rollout_records import RolloutRecorder
from hyvideo.training.rollouts import Rollouts
from hyvideo.training.run import LoadedInputs, Models, Run
from hyvideo.training.run_state import RunState


def build_run(
    config: Config,  # with absolute paths
    mesh: Mesh,
    device: torch.device,
    progress: Progress,
    lease: Lease,  # of the output folder, on the main rank
    *,
    run_id: str,  # identity of the run, which marks its folders
    recorded: Config,  # the settings as given, for checkpoints
    scorers: dict[str, Scorer] | None = None,  # by name; default: created from the settings
) -> Run:
    """Check the settings, load the models and return the parts of the run.

    Raises ValueError for unusable checkpoints or prompts before any weights are read. Collective.
    """
    progress.enter("check", "the files of the model")
    loaded = load_inputs(config, mesh, device)
    rewards = load_rewards(config, mesh, device, progress, loaded, scorers)
    agree("the digest of", loaded.digests, mesh)
    models = load_models(config, mesh, device, progress, loaded)
    objective = make_objective(config, progress, loaded, models)
    prompt = loaded.inputs.requests[0].prompt
    reward_term = make_reward_term(config, objective, rewards.scorer, prompt)
    plan = loaded.inputs.plan
    if loaded.latents:
        source = GivenVideos(objective, models.encoder, loaded.inputs, loaded.latents)
    else:
        source = Rollouts(objective, models.encoder, rewards, loaded.inputs)
    recorder = RolloutRecorder(
        config.record,
        config.data,
        mesh,
        group_size=config.rollout.num_generations,
        num_rollouts=plan.rollouts,
        run_id=run_id,
    )
    update = PolicyUpdate(objective, reward_term)
    checkpoints = _checkpoint_writer(config, mesh, lease, run_id)
    state = RunState(
        recorded,
        update,
        checkpoints,
        progress,
        num_rollouts=plan.rollouts,
        inputs=loaded.digests,
    )
    return Run(
        config=config,
        loaded=loaded,
        rewards=rewards,
        encoder=models.encoder,
        policy=models.policy,
        pipeline=models.pipeline,
        progress=progress,
        objective=objective,
        source=source,
        recorder=recorder,
        update=update,
        state=state,
    )


def load_inputs(config: Config, mesh: Mesh, device: torch.device) -> LoadedInputs:
    """Read everything that decides what the run learns, and check that it fits the settings and the
    machine, before models are loaded. Collective.
    """
    inputs = RunInputs(config, mesh.world_size)
    objective_class(config.objective.name)
    sources = {
        config.objective.videos_from or "prompts_csv": inputs.prompts,
        "valid_video_csv": inputs.validated,
    }
    kinds = check_checkpoint(config, sources, list(config.video_sizes.values()))
    check_adapter(config.model, config.optimizer)
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        digests = digest_inputs(config, inputs, kinds)
    latents = None
    if inputs.videos:
        latents = VideoLatents(
            Path(config.record.output_dir),
            inputs.videos.videos,
            form=ClipForm(*config.sampling.size, config.data.fps, config.data.fit),
            vae_weights=vae_weights(config.model),
            vae_identity=vae_identity(config.model),
        )
        name = config.objective.videos_from
        digests[name] = digest_of(inputs.videos.digest, latents.contents)
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
    return LoadedInputs(inputs, digests, latents, planned_run, attention)


def load_rewards(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    progress: Progress,
    loaded: LoadedInputs,
    given: dict[str, Scorer] | None,
) -> GroupRewards:
    """Return the rewards of the run, after a check of its prompts and a trial on one video; adds
    their digests to those of the inputs. Collective.
    """
    progress.enter("load", "the reward model")
    requests = loaded.inputs.requests if config.objective.scores_rollouts else []
    validated = loaded.inputs.validated
    is_scored = config.objective.scores_rollouts or bool(validated)
    # A wrong scorer may fail on one rank only, for example because its file is missing there.
    with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
        scorer = make_async_scorer(config, device, given if is_scored else {})
        scorer.check_prompts(
            [request.prompt for request in requests], [request.prompt for request in validated]
        )
        if config.objective.scores_rollouts and given is None:
            loaded.digests.update(reward_digests(config, scorer.scorers))
        if given is None and is_scored:
            try_scorers(scorer, config.data, loaded.inputs.requests[0].prompt)
            if scorer.held_out_scorers:
                try_scorers(scorer.held_out_scorers, config.data, validated[0].prompt)
    return GroupRewards(
        config.reward,
        scorer,
        mesh,
        group_size=config.rollout.num_generations,
        num_rollouts=loaded.inputs.plan.rollouts,
    )


def load_models(
    config: Config, mesh: Mesh, device: torch.device, progress: Progress, loaded: LoadedInputs
) -> Models:
    """Load encoders, VAE and transformer, encode prompts and given videos, and try what may fail
    later. Collective.
    """
    inputs = loaded.inputs
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
    if loaded.latents:
        loaded.latents.encode(vae, mesh, on_stage=progress.enter)
    negative = negative_condition(config.negative_requests, encoder, device)

    progress.enter("load", "the transformer")
    used = encoded if config.num_branches == 2 else inputs.requests
    policy = Policy(config, mesh, device, used)
    pipeline = make_pipeline(
        config.sampling,
        config.model.dtype,
        policy.transformer,
        vae,
        negative,
        is_batched=config.rollout.batched_forward == "true",
        partner=load_partner(config, mesh, device, used),
    )
    put(policy.transformer, config.placements.policy, device)
    come_back(policy.transformer)
    # Other objectives tolerate rounding.
    if config.distributed.enable_compile == "true" and config.objective.has_ratio:
        progress.enter("load", "compiled blocks")
        _probe_compiled_blocks(config, mesh, pipeline, encoder, inputs.requests[0])
    pipeline.with_progress = progress.steps
    for size in dict.fromkeys(config.video_sizes.values()):
        pipeline.try_decoding(*size, batch_size=config.rollout.decode_batch_size)
    return Models(encoder, policy, pipeline)


def make_objective(
    config: Config, progress: Progress, loaded: LoadedInputs, models: Models
) -> Objective:
    """Return the objective of the run. Raises ValueError if a custom one cannot be created."""
    cost = Cost(loaded.planned_run, counts_flops=models.pipeline.device.type == "cuda")
    cls = objective_class(config.objective.name)
    with named_errors(f"objective {config.objective.name} cannot be created", cls.__module__):
        return cls(config, models.policy, models.pipeline, progress, cost)


def make_reward_term(
    config: Config, objective: Objective, scorer: AsyncScorer, prompt: str
) -> RewardTerm | None:
    """Return the reward gradient of the run, if it has one, after a trial of the scorers with
    ``prompt``.
    """
    if not config.objective.reward_weight:
        return None
    gradient = RewardGradient(
        objective.pipeline,
        scorer,
        fps=config.data.fps,
        batch_size=config.rollout.decode_batch_size,
    )
    if not config.reward.ignore_rewards:
        try_gradient(gradient, config.data, prompt)
    return RewardTerm(objective, gradient)


def _probe_compiled_blocks(
    config: Config,
    mesh: Mesh,
    pipeline: GRPOPipeline,
    encoder: ConditionEncoder,
    request: Request,
) -> None:
    """Let rollouts run the compiled graphs of training if the others round differently."""
    conditions = encoder([request], config.sampling.size)
    match_gradient_mode(
        pipeline,
        config.sampling.schedule(),
        conditions.to(pipeline.device),
        config.sampling.size,
        mesh,
        batch_size=config.rows_per_pass,
    )


def _checkpoint_writer(config: Config, mesh: Mesh, lease: Lease, run_id: str) -> CheckpointWriter:
    settings = config.record
    return CheckpointWriter(
        Path(settings.output_dir),
        mesh,
        keep=settings.save_total_limit,
        is_asynchronous=settings.save_asynchronously,
        timeout=config.distributed.timeout,
        check_owner=lease.check,
        run=run_id,
    )
