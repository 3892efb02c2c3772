"""What a run stores in a checkpoint: the values of state.json, and its tensors by name.

    policy.NAME         weight of the model, or of the adapter in LoRA training
    optimizer.NAME.KEY  state of the optimizer for this weight
    anchor.NAME         weight of the anchor, unless it equals the policy's
    average.NAME        weight of the EMA

`training.run_state` takes the values from a run and gives them back.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class State:
    """The values that a run needs besides its tensors to continue bit for bit: state.json."""

    run: str
    """Identity of the run."""
    metrics: dict[str, float]
    """Metrics of the last finished iteration, without those of its validation."""
    rollouts: int
    """Rollouts per iteration, over all replicas."""
    settings: dict[str, Any]
    """Settings by flag."""
    inputs: dict[str, str]
    """Digests of what the run reads, by setting."""
    iteration: int
    """Last finished iteration."""
    update: int
    """Optimizer updates so far."""
    anchor_age: int
    """Updates since the anchor was set; 0 if it equals the policy."""
    kl_coefficient: dict[str, Any]
    """State of the feedback on the KL coefficient."""
    health: dict[str, Any]
    """Recent gradient norms, and bad updates in a row."""


POLICY = "policy"
OPTIMIZER = "optimizer"
ANCHOR = "anchor"
AVERAGE = "average"


def optimizer_name(parameter: str, key: str = "") -> str:
    """Return the name of an optimizer's state ``key`` for a parameter; without one, its start."""
    return f"{OPTIMIZER}.{parameter}.{key}"


def sampled_name(parameter: str, stored: Collection[str]) -> str:
    """Return the name of the weight with which a checkpoint is sampled: the EMA's if it is among the
    ``stored`` names, else the policy's.
    """
    average = f"{AVERAGE}.{parameter}"
    return average if average in stored else f"{POLICY}.{parameter}"
