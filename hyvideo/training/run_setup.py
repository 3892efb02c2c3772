"""Construction of the parts of a run from its settings, with checks before any weights are read."""

from functools import partial
from pathlib import Path

import torch

from hyvideo.config.memory.disk import check_room
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.objectives import objective_class
from hyvideo.config.run_plan import make_plan
from hyvideo.config.sections import RecordSettings
from hyvideo.config.settings import Config
from hyvideo.data.prompts import read_requests
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.collectives import all_objects, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership
from hyvideo.models.reward_models.rewards import Scorer
from hyvideo.models.sizes import read_architecture
from hyvideo.training.compile_probe import match_gradient_mode
from hyvideo.training.cost import Cost
from hyvideo.training.model_setup import (
    check_adapter,
    check_checkpoint,
    choose_attention,
    load_encoder,
    make_pipeline,
    negative_condition,
    precompute_conditions,
    rollout_schedule,
)
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.preemption import PreemptionSignals
from hyvideo.training.rewards import GroupRewards, make_async_scorer, try_held_out, try_scorers
from hyvideo.training.rollout_batch import RolloutNoise
from hyvideo.training.rollout_collector import RolloutCollector
from hyvideo.training.rollout_records import RolloutRecorder
from hyvideo.training.run_state import Progress, RunState, hash_files
from hyvideo.training.sampler_check import custom_steps


class RunParts:
    """Base class of the trainer that checks the settings, loads the models and creates the components."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        progress: Progress,
        owner: Ownership,  # of the run's folder
        run_id: str,  # identity of the run, which marks its folders
        recorded: Config,  # the settings as given, for checkpoints; ``config`` has absolute paths
        scorers: dict[str, Scorer] | None = None,  # by name; default: created from the settings
    ):
        self.plan = plan = make_plan(config, mesh.world_size)
        objective = objective_class(config.loss.objective)
        steps = custom_steps(config.rollout, mesh)
        schedule = rollout_schedule(config.rollout)
        requests, hashes = read_requests(*config.data.prompts_csv), hash_files(config.flat())
        validated = read_requests(*config.data.valid_video_csv)
        encoded, sources = requests + config.negative_requests, {"prompts_csv": requests, "valid_video_csv": validated}
        check_checkpoint(config, sources, [*config.video_sizes.values()])
        check_adapter(config.model, config.optimizer)
        architecture = read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        self.planned_run = run = PlannedRun(config, mesh.world_size, architecture)
        with raise_on_all_ranks(mesh):
            if mesh.is_main:
                check_room(run)
        options = {"tokens": architecture.image_tokens(*config.rollout_size), "sp_size": mesh.sp_size}
        options |= {"gather": partial(all_objects, mesh=mesh)}
        self.attention = choose_attention(config.model, device, **options)
        progress.enter("load", "the reward model")
        if scorers is None and not objective.needs_rewards and not validated:
            scorers = {}  # no video is scored
        self.scorer = make_async_scorer(config, device, scorers)
        self.scorer.check_prompts(*([request.prompt for request in each] for each in (requests, validated)))
        if config.reward.check_reward and scorers is None:
            try_scorers(self.scorer, config.data, requests[0].prompt)
            if self.scorer.held_out_scorers:
                try_scorers(self.scorer.held_out_scorers, config.data, validated[0].prompt)
            if validated:
                try_held_out(self.scorer, config.data, validated[0].prompt)
        progress.enter("load", "the text encoders and the VAE")
        self.encoder, vae = load_encoder(config, device)
        if config.model.precompute_conditions:
            sized = [(encoded, config.rollout_size), (validated, config.validation_size)]
            precompute_conditions(self.encoder, sized, mesh, on_stage=progress.enter)
        negative = negative_condition(config.negative_requests, self.encoder, device)
        progress.enter("load", "the transformer")
        trained = encoded if config.num_branches == 2 else requests
        self.policy = Policy(config, mesh, device, trained)
        self.pipeline = make_pipeline(config.rollout, config.model.dtype, self.policy.transformer, vae, negative)
        if config.distributed.enable_compile == "true" and objective.has_ratio:  # others tolerate rounding
            progress.enter("load", "compiled blocks")
            probed = self.encoder(requests[:1], height=config.data.height, width=config.data.width)
            match_gradient_mode(
                self.pipeline,
                schedule,
                probed.to(device),
                config.rollout_size,
                mesh,
                batch_size=config.rows_per_pass,
            )
        self.signals = PreemptionSignals(mesh)
        self.pipeline.with_progress = partial(progress.steps, check=self.signals.check)
        for size in dict.fromkeys(config.video_sizes.values()):
            self.pipeline.try_decoding(*size, batch_size=config.rollout.decode_batch_size)
        sizes = {"group_size": config.rollout.num_generations, "num_rollouts": plan.rollouts}
        self.cost = Cost(run)
        shape = self.pipeline.latent_shape(*config.rollout_size)
        self.objective = objective(
            config,
            mesh,
            self.pipeline,
            self.policy,
            noise=RolloutNoise(config.data.seed, shape, config.rollout.use_same_noise),
            num_updates=plan.updates,
            cost=self.cost,
            on_stage=progress.enter,
            check=self.signals.check,
        )
        self.collector = RolloutCollector(
            config,
            mesh,
            self.pipeline,
            self.encoder,
            self.scorer,
            requests,
            self.objective,
            plan=plan,
            schedule=schedule,
            cost=self.cost,
            check=self.signals.check,
        )
        self.rewards = GroupRewards(config.reward, self.scorer, mesh, **sizes)
        self.recorder = RolloutRecorder(config.record, config.data, mesh, **sizes, run_id=run_id)
        self.update = PolicyUpdate(
            config,
            mesh,
            self.policy,
            self.objective,
            device=device,
            num_updates=plan.updates,
            cost=self.cost,
            on_stage=progress.enter,
            check=self.signals.check,
        )
        self.checkpoints = _checkpoint_writer(
            config.record,
            mesh,
            owner,
            run_id,
            timeout=config.distributed.collective_timeout,
        )
        self.state = RunState(
            recorded,
            self.policy,
            self.update,
            self.checkpoints,
            progress,
            num_rollouts=plan.rollouts,
            contents=hashes,
            custom_steps=steps,
        )


def _checkpoint_writer(
    settings: RecordSettings, mesh: Mesh, owner: Ownership, run_id: str, *, timeout: float
) -> CheckpointWriter:
    return CheckpointWriter(
        Path(settings.output_dir),
        mesh,
        keep=settings.save_total_limit,
        keep_every=settings.keep_every,
        is_asynchronous=settings.save_asynchronously,
        timeout=timeout,
        owner=owner,
        run=run_id,
    )
