"""The parts of a run, built from its settings: what can be refused is refused before any weights are read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from hyvideo.config.memory.cost import training_forwards
from hyvideo.config.memory.disk import check_room
from hyvideo.config.memory.model_sizes import read_architecture
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.run_plan import Plan, make_plan
from hyvideo.config.sections import RecordSettings
from hyvideo.config.settings import Config
from hyvideo.data.prompts import read_requests
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.collectives import failing_together
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Scorer
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.training.model_setup import (
    RequiredEncoders,
    check_adapter,
    check_checkpoint,
    load_encoder,
    make_pipeline,
    negative_condition,
    precompute_conditions,
)
from hyvideo.training.nft_update import NFTUpdate
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.preemption import PreemptionSignals
from hyvideo.training.rewards import GroupRewards, make_async_scorer, try_scorers
from hyvideo.training.rollout_collector import Cost, RolloutCollector
from hyvideo.training.rollout_records import RolloutRecorder
from hyvideo.training.run_state import Progress, RunState, contents

UPDATES = {"grpo": PolicyUpdate, "nft": NFTUpdate}


@dataclass(frozen=True)
class RunParts:
    """Parts that the trainer plays on."""

    plan: Plan
    signals: PreemptionSignals
    cost: Cost
    encoder: ConditionEncoder
    policy: Policy
    pipeline: HunyuanVideoGRPOPipeline
    collector: RolloutCollector
    scorer: AsyncScorer
    rewards: GroupRewards
    recorder: RolloutRecorder
    update: PolicyUpdate
    checkpoints: CheckpointWriter
    state: RunState


def build_parts(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    progress: Progress,
    owner: Ownership,
    *,
    scorers: dict[str, Scorer] | None = None,
) -> RunParts:
    """Checks what a run needs, loads its models and joins them.

    Args:
        owner: Says that the folder of the run is this life's.
        scorers: The rewards by name; by default those that the settings name.

    Raises: ValueError for checkpoints, prompts or scorers that cannot be used, before any weights are read.
    """
    plan = make_plan(config, mesh.world_size)
    requests, hashes = read_requests(*config.data.prompts_csv), contents(config.flat())
    validated = read_requests(*config.data.valid_video_csv)
    encoded = requests + config.negative_requests
    check_checkpoint(config, {"prompts_csv": requests, "valid_video_csv": validated}, [*config.video_sizes.values()])
    check_adapter(config.model, config.optimizer)
    architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
    run = PlannedRun(config, mesh.world_size, architecture)
    with failing_together(mesh):
        if mesh.is_main:
            check_room(run)
    scorer = make_async_scorer(config, device, scorers)
    scorer.check_prompts([request.prompt for request in requests + validated])
    if config.reward.check_reward and scorers is None:
        try_scorers(scorer, config.data, requests[0].prompt)
    encoder, vae = load_encoder(config, device)
    if config.model.precompute_conditions:
        precompute_conditions(encoder, [(encoded, config.rollout_size), (validated, config.validation_size)], mesh)
    negative = negative_condition(config.negative_requests, encoder, device)
    trained = encoded if config.num_branches == 2 else requests
    policy = Policy(config, mesh, device, RequiredEncoders.of(trained))
    pipeline = make_pipeline(config.rollout, config.model.dtype, policy.transformer, vae, negative)
    sizes = {"group_size": config.rollout.num_generations, "num_rollouts": plan.rollouts}
    cost = Cost(training_forwards(run))
    signals = PreemptionSignals(mesh)
    common = {"cost": cost, "check": signals.check}
    how = common | {"num_updates": plan.updates, "on_stage": progress.enter}
    update = UPDATES[config.loss.objective](config, mesh, pipeline, policy, **how)
    checkpoints = _checkpoint_writer(config.record, mesh, owner, timeout=config.distributed.collective_timeout)
    return RunParts(
        plan=plan,
        signals=signals,
        cost=cost,
        encoder=encoder,
        policy=policy,
        pipeline=pipeline,
        collector=RolloutCollector(config, mesh, pipeline, encoder, scorer, requests, plan=plan, **common),
        scorer=scorer,
        rewards=GroupRewards(config.reward, scorer, mesh, **sizes),
        recorder=RolloutRecorder(config.record, config.data, mesh, **sizes),
        update=update,
        checkpoints=checkpoints,
        state=RunState(config, policy, update, checkpoints, progress, num_rollouts=plan.rollouts, contents=hashes),
    )


def _checkpoint_writer(settings: RecordSettings, mesh: Mesh, owner: Ownership, *, timeout: float) -> CheckpointWriter:
    return CheckpointWriter(
        Path(settings.output_dir),
        mesh,
        keep=settings.save_total_limit,
        keep_every=settings.keep_every,
        is_asynchronous=settings.save_asynchronously,
        timeout=timeout,
        owner=owner,
    )
