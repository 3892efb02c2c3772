"""On-policy check: before the first update, the training path must reproduce the log-probabilities
of the rollouts.

The policy is then still the rollout policy, so every ratio is 1. Any other ratio means that rollout
and update compute different numbers, and that the trained policy is not the sampled one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hyvideo.distributed.collectives import gather_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.family import blocks, family_of
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.schedulers.schedule import filled
from hyvideo.settings.objectives import ObjectiveSettings
from hyvideo.training.rollout_batch import RolloutBatch

# Equal shapes give bitwise equal results; in float32, other shapes change only the order of
# additions.
EXACT = 1e-6
# Relative rounding errors of a step: if only the order of additions differs; if batch shapes differ
# in bf16.
EXACT_STEP, ROUNDED_STEP = 1e-4, 5e-2
ROUNDING = 1e-4  # largest relative difference of a module's outputs that is explained by rounding


class OffPolicyError(RuntimeError):
    """Rollout and update compute different log-probabilities."""


class Limited(NamedTuple):
    """A measured value of a check, and the largest that is right."""

    value: Tensor  # ()
    limit: float
    advice: str = ""  # what may be wrong


def step_tolerance(dtype: str) -> float:
    """Return the largest relative difference of a step that is explained by rounding."""
    return EXACT_STEP if dtype == "fp32" else ROUNDED_STEP


def check_limits(place: str, checked: Mapping[str, Limited], mesh: Mesh) -> None:
    """Raise OffPolicyError, on all ranks together, if a value of any rank is above its limit or NaN.

    Args:
        place: Beginning of the error, such as ``iteration 3, objective nft``.
        checked: Values by what they are, as the subject of a sentence. The same on all ranks.
    """
    if not checked:
        return
    values = torch.stack([each.value.detach().float().reshape(()) for each in checked.values()])
    largest = gather_ranks(values, mesh).amax(0).tolist()
    for (text, (_, limit, advice)), value in zip(checked.items(), largest, strict=True):
        if not value <= limit:
            reason = f"; {advice}" if advice else ""
            raise OffPolicyError(f"{place}: {text} is {value:.3g}, above {limit:g}{reason}")


def log_ratio_tolerances(loss: ObjectiveSettings, dtype: str) -> tuple[float, float]:
    """Return the limits of |log ratio| for equal and for different shapes of the transformer calls.

    In bf16, other shapes round differently. The limit is then the clip range, beyond which the loss
    would be clipped.
    """
    return EXACT, EXACT if dtype == "fp32" else loss.clip_range


class OnPolicyCheck:
    """Stops the run if the ratios of fresh rollouts, sampled in batches of ``batch_size`` in
    ``dtype``, are not 1.
    """

    def __init__(
        self,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        loss: ObjectiveSettings,
        *,
        dtype: str,
        batch_size: int,
    ):
        self.mesh = mesh
        self.pipeline = pipeline
        self.batch_size = batch_size
        self.dtype = dtype
        self.tolerances = log_ratio_tolerances(loss, dtype)

    def __call__(
        self,
        rollouts: RolloutBatch,
        passes: list[tuple[list[int], int]],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise OffPolicyError on all ranks if one of ``deviations``, the largest |ratio - 1| by
        pass, is too large.
        """
        shapes = [self._shape_difference(rollouts, rows) for rows, _ in passes[: len(deviations)]]
        limits = [self.tolerances[difference is not None] for difference in shapes]
        local = torch.stack(deviations) / filled(limits, deviations[0].device)
        by_rank = gather_ranks(local, self.mesh)
        if not (by_rank > 1).any():
            return
        # the same pass on all ranks, so that they make the same number of calls
        index = int(by_rank.amax(0).argmax())
        message = self._diagnosis(rollouts, passes[index], iteration, limits[index], shapes[index])
        worst = int(by_rank.amax(1).argmax())
        raise OffPolicyError(
            message
            if worst == self.mesh.rank
            else f"rank {worst} has the largest deviation; on this rank: {message}"
        )

    def _diagnosis(
        self,
        rollouts: RolloutBatch,
        a_pass: tuple[list[int], int],
        iteration: int,
        tolerance: float,
        shapes: str | None,
    ) -> str:
        """Return the error message, with the first module that differs when the pass is repeated as
        in the rollout.

        All ranks must call this.
        """
        rows, column = a_pass[0] or [0], a_pass[1]

        def log_ratios(rows: list[int]) -> Tensor:
            """Return the |log ratio| of each row. Shape: (rows,)."""
            steps = rollouts.trained_steps[rows, column]
            log_probs = rollouts.replay(self.pipeline, rows, steps).log_prob.detach()
            return (log_probs - rollouts.trajectories.log_probs[rows, steps]).abs()

        rows = [rows[i] for i in log_ratios(rows).argsort().tolist()]  # the last row deviates most
        step = int(rollouts.trained_steps[rows[-1], column])
        others = [row for row in self._sampled_with(rollouts, rows[-1]) if row != rows[-1]]
        with last_outputs(self.pipeline.transformer) as in_update:
            measured = log_ratios(rows).max().item()
        with torch.no_grad(), last_outputs(self.pipeline.transformer) as in_rollout:
            log_ratios([*others, rows[-1]])
        return "\n".join(
            [
                f"iteration {iteration}: rollout and update compute different log-probabilities. On "
                f"rank {self.mesh.rank} the log-ratio of fresh rollouts is {measured:.3g} at step "
                f"{step + 1}, at sigma {rollouts.schedule.sigmas[step]:.3g}, above the tolerance of "
                f"{tolerance:g}. The policy was not changed.",
                _advice(shapes, self.dtype),
                f"  first module that differs: {first_difference(in_rollout, in_update) or 'none'}",
            ]
        )

    def _shape_difference(self, rollouts: RolloutBatch, rows: list[int]) -> str | None:
        """Return how the shapes of the transformer calls differ in rollout and update; None if they
        are equal.
        """
        lengths = [sample.lengths for sample in rollouts.conditions.samples]
        if not self.pipeline.sampling.batched_forward:
            return None
        for batch in (self._sampled_with(rollouts, row) for row in rows):
            if [lengths[row] for row in batch] != [lengths[row] for row in rows]:
                counts = f"{len(batch)} samples in the rollout, {len(rows)} in the update"
                return counts if len(batch) != len(rows) else "texts of other lengths"
        return None

    def _sampled_with(self, rollouts: RolloutBatch, row: int) -> list[int]:
        """Return the rows of the batch in which a row was sampled."""
        first = row // self.batch_size * self.batch_size
        return list(range(first, min(first + self.batch_size, len(rollouts))))


def _advice(shapes: str | None, dtype: str) -> str:
    """Return what to try, given how the shapes of the transformer calls differ in rollout and
    update.
    """
    if shapes is not None:
        cause = f"in {dtype} another shape rounds differently: use"
        if dtype == "fp32":
            cause = "probably the forward pass mixes the rows of a batch. If it does not, use"
        return (
            f"  the transformer calls have different shapes ({shapes}); {cause} --batched_forward "
            "false, or equal batch_size and mini_batch_size_per_update"
        )
    return (
        "  the transformer calls have equal shapes. If only the kernels differ, try "
        "--enable_compile false"
    )


@contextmanager
def last_outputs(transformer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the output of each part and block of the transformer for the last row, by name, in the
    order of calls.
    """
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def store(_module, _inputs, output) -> None:
            first = output[0] if isinstance(output, tuple) else output
            # a module may receive no tokens
            if isinstance(first, Tensor) and first.ndim and first.numel():
                outputs[name] = first[-1].detach().float().cpu()

        return store

    parts = {
        name: part
        for name, part in transformer.named_children()
        if not isinstance(part, nn.ModuleList)
    }
    parts |= {
        f"{family_of(transformer).blocks}.{i}": block for i, block in enumerate(blocks(transformer))
    }
    with ExitStack() as hooks:
        for name, part in parts.items():
            hooks.enter_context(part.register_forward_hook(hook(f"{name} ({type(part).__name__})")))
        yield outputs


def first_difference(expected: dict[str, Tensor], outputs: dict[str, Tensor]) -> str | None:
    """Return the first name of equally shaped outputs that differ, preferably by more than
    rounding; None if none.
    """
    differences = {}
    for name, output in outputs.items():
        if name in expected and expected[name].shape == output.shape:
            difference = (expected[name] - output).abs().max()
            differences[name] = difference / expected[name].abs().max()
    for least in (ROUNDING, 0.0):
        for name, difference in differences.items():
            if difference > least:
                return name
    return None
