"""Settings of objective distill."""

from collections.abc import Mapping
from typing import Literal

from hyvideo.settings.objectives.base import TrainedStepsSettings
from hyvideo.settings.problems import Problems
from hyvideo.settings.sections import MAX_STEPS, RolloutSettings, learning


class DistillSettings(TrainedStepsSettings):
    """A student of few steps, which follows its guided teacher."""

    name = "distill"
    label = "Step distillation"
    sentence = "a student of few steps"
    class_path = "hyvideo.training.objectives.distill:Distill"
    trains = "path"
    validates_own_steps = True
    needs_rewards = False

    kl_strategy: Literal["fixed"] = learning("fixed", "The teacher is the anchor.")
    anchor_substeps: int = learning(
        1, "Steps that the teacher takes for each step of a rollout.", ge=1, le=MAX_STEPS
    )

    @property
    def strategy(self) -> str:
        return self.kl_strategy

    def problems(
        self, rollout: RolloutSettings, *, guidance: Mapping[str, float], rows_per_pass: int
    ) -> Problems:
        """Yield rollouts with which a student cannot follow its teacher."""
        if rollout.eta != 0:
            yield (
                f"objective {self.name} needs eta 0, because the student follows the ODE of its "
                f"teacher, got {rollout.eta}; set eta 0"
            )
        if rollout.cfg_scale > 1:
            yield (
                f"objective {self.name} needs cfg_scale 1, because the student learns the guidance "
                f"of its teacher, got {rollout.cfg_scale:g}; set cfg_scale 1 and the guidance of the "
                "teacher as anchor_cfg_scale"
            )
