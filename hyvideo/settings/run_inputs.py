"""Inputs of a run: what its settings name and imply before a model is loaded, each read or computed
once.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from hyvideo.data.examples import Examples
from hyvideo.data.prompts import PromptFiles, Request
from hyvideo.models.sizes import Sizes, read_architecture
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import Plan, make_plan


@dataclass(frozen=True)
class RunInputs:
    """Settings of a run on ``world_size`` processes, and the prompts, plan and architecture that
    follow from them.

    Every property is read or computed when it is first needed. It raises ValueError if a file or
    setting is invalid.
    """

    config: Config
    world_size: int = 1
    files: PromptFiles = field(default_factory=PromptFiles, compare=False)

    def with_config(self, config: Config) -> "RunInputs":
        """Return the inputs of a run with other settings.

        Files that both runs name are not read again.
        """
        return replace(self, config=config)

    @cached_property
    def videos(self) -> Examples | None:
        """Videos that are trained on in place of rollouts; None for rollouts."""
        objective = self.config.objective
        return objective.read_videos(self.config.data.seed) if objective.videos_from else None

    @cached_property
    def requests(self) -> list[Request]:
        """Prompts for training."""
        if self.videos:
            return self.videos.requests
        return self.files.read(self.config.data.prompts_csv)

    @cached_property
    def prompts(self) -> list[Request]:
        """Prompts for training, and those of held-out videos."""
        return self.videos.all_requests if self.videos else self.requests

    @cached_property
    def validated(self) -> list[Request]:
        """Prompts for validation; empty without validation."""
        return self.files.read(self.config.data.valid_video_csv)

    @cached_property
    def plan(self) -> Plan:
        """Counts of an iteration."""
        return make_plan(self.config, self.world_size)

    @cached_property
    def architecture(self) -> Sizes:
        """Sizes of the transformer, from its config.json or from the released version."""
        return read_architecture(
            self.config.model.pretrained_model_root, self.config.model.transformer_version
        )


def trained_prompts(config: Config) -> list[Request]:
    """Return the prompts that a run trains on; none if their files have moved."""
    try:
        return RunInputs(config).requests
    except ValueError:
        return []
