"""Counts of forward passes and FLOPs of an iteration."""

from dataclasses import replace

from hyvideo.planning.cost import Pass, decode_flops, training_forwards, training_pass
from hyvideo.planning.planned_run import PlannedRun


class Cost:
    """Forward passes of the transformer for this replica's rollouts; FLOPs of this rank without
    recomputation.
    """

    def __init__(self, run: PlannedRun):
        self.run = run
        self.per_training_pass = training_forwards(run)
        # unknown for other VAEs
        self.decode_flops = decode_flops(run) if run.architecture.is_released else 0.0
        self.start(run.text_tokens)

    def start(self, text_tokens: int) -> None:
        """Start an iteration whose prompts have ``text_tokens`` on average."""
        run = replace(
            self.run.with_settings(enable_gradient_checkpointing=False), text_tokens=text_tokens
        )
        self._flops_of = {
            "forward": Pass().flops(run).total,
            "training": training_pass(run).flops(run).total,
        }
        self.forwards = 0.0
        self.flops = 0.0

    def add(self, passes: float, *, kind: str = "forward") -> None:
        """Count passes: ``forward``, or ``training`` for forward and backward."""
        self.forwards += passes * (self.per_training_pass if kind == "training" else 1)
        self.flops += passes * self._flops_of[kind]
