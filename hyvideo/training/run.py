"""The parts of a run."""

from dataclasses import dataclass

from hyvideo.loading.video_latents import VideoLatents
from hyvideo.models.attention_kernels import Choice
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.given_videos import GivenVideos
from hyvideo.training.objective import Objective
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.progress import Progress
from hyvideo.training.rewards import GroupRewards
from hyvideo.training.rollout_records import RolloutRecorder
from hyvideo.training.rollouts import Rollouts
from hyvideo.training.run_state import RunState


@dataclass(frozen=True)
class LoadedInputs:
    """What a run reads before its models, on all ranks alike."""

    inputs: RunInputs  # prompts, plan of an iteration and architecture
    digests: dict[str, str]  # of everything that the run reads, by setting
    latents: VideoLatents | None  # of given videos; None for rollouts
    planned_run: PlannedRun  # predicted memory and cost
    attention: Choice  # attention kernel, and why others were rejected


@dataclass(frozen=True)
class Models:
    """The models of a run."""

    encoder: ConditionEncoder  # prompts -> conditions
    policy: Policy  # trained transformer, with anchor, EMA and optimizers
    pipeline: GRPOPipeline  # sampling, replay and decoding


@dataclass(frozen=True)
class Run:
    """The parts of a run; made in `run_setup.build_run`."""

    config: Config  # with absolute paths
    loaded: LoadedInputs
    rewards: GroupRewards  # scorers, and advantages within groups
    encoder: ConditionEncoder
    policy: Policy
    pipeline: GRPOPipeline
    progress: Progress  # iteration, stage and stop signals
    objective: Objective  # what an update trains on, and its loss
    source: Rollouts | GivenVideos  # of the data of an iteration
    recorder: RolloutRecorder  # scores and videos of rollouts
    update: PolicyUpdate  # gradients and optimizer steps
    state: RunState  # contents of a checkpoint

    @property
    def inputs(self) -> RunInputs:
        return self.loaded.inputs

    @property
    def scorer(self) -> AsyncScorer:
        return self.rewards.scorer

    @property
    def scores_rollouts(self) -> bool:
        """True if the videos of the rollouts are decoded and scored."""
        return self.config.objective.scores_rollouts
