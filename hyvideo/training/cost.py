"""Counts of forward passes and FLOPs of an iteration."""

from hyvideo.planning.hours import decode_flops, training_flops, training_forwards
from hyvideo.planning.planned_run import PlannedRun


class Cost:
    """Forward passes of the transformer for this replica's rollouts; FLOPs of this rank without
    recomputation, which are counted if ``counts_flops``.
    """

    def __init__(self, run: PlannedRun, *, counts_flops: bool):
        self.per_training_pass = training_forwards(run)
        self.decode_flops = 0.0
        self._flops_of = {"forward": 0.0, "training": 0.0}
        if counts_flops:
            plain = run.with_settings(activation_checkpointing="none")
            self.decode_flops = decode_flops(run)
            for kind, flops in (("forward", run.forward), ("training", training_flops(plain))):
                self._flops_of[kind] = flops.total / run.settings.sp_size
        self.start()

    def start(self) -> None:
        """Start an iteration."""
        self.forwards = 0.0
        self.flops = 0.0

    def add(self, passes: float, *, kind: str = "forward") -> None:
        """Count passes: ``forward``, or ``training`` for forward and backward."""
        self.forwards += passes * (self.per_training_pass if kind == "training" else 1)
        self.flops += passes * self._flops_of[kind]
