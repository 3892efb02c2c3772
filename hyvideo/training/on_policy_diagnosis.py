"""Why rollout and update differ: the worst pass is made again with one suspect switched at a time.

Opened when the on-policy check has found a difference. The tokens are followed through the modules to the first one
whose output is another one in training than in the rollout.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.data.templates import fill
from hyvideo.models.attention import WholeSequence
from hyvideo.models.family import blocks, family_of, install
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline

_ROUNDING = 1e-4  # of an output's largest number


@dataclass(frozen=True)
class Transitions:
    """Stored transitions as the training path and as the rollout see them."""

    replay: Callable[[], Tensor]  # log-probabilities by the training path, with gradient (batch,)
    replay_as_rollout: Callable[[], Tensor]  # of the last of them, in the rollout's own batch, without gradient ()
    log_probs: Tensor  # that the rollout recorded (batch,)
    dtype: torch.dtype  # of the conditions
    is_even: bool  # every rank replays as many: sharded ones may replay them one by one
    shapes: str | None  # of the transformer's calls in rollout and update, where they differ

    def deviation(self) -> float:
        """Largest |log ratio| of the training path."""
        return (self.replay().detach() - self.log_probs).abs().max().item()


def explain(transitions: Transitions, pipeline: GRPOPipeline, *, tolerance: float, rank: int, iteration: int) -> str:
    """The message that stops the run: the deviation, its causes, the first module that differs. All ranks call."""
    measured = transitions.deviation()
    with torch.no_grad():
        same_batch = (transitions.replay_as_rollout() - transitions.log_probs[-1]).abs().item()
    switched = {}
    for name, in_other_state in suspects(transitions, pipeline).items():
        with in_other_state:
            switched[name] = transitions.deviation()
    return fill(
        Path(__file__).with_suffix(".txt.jinja"),
        iteration=iteration,
        rank=rank,
        measured=measured,
        tolerance=tolerance,
        shapes=transitions.shapes,
        same_batch=same_batch,
        causes={name: ratio for name, ratio in switched.items() if ratio <= tolerance},
        where=first_difference(transitions, pipeline.transformer),
    )


def suspects(transitions: Transitions, pipeline: GRPOPipeline) -> dict[str, AbstractContextManager]:
    """Everything known to make the two differ, but for the batch shape: a context that switches it, by its name."""
    transformer, layers = pipeline.transformer, blocks(pipeline.transformer)
    sampling = replace(pipeline.sampling, batched_forward=not pipeline.sampling.batched_forward)
    other = torch.float32 if pipeline.compute_dtype != torch.float32 else torch.bfloat16
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in transformer.modules())
    found = [
        ("dropout or train mode", transformer.training or has_dropout, _with(transformer.modules(), "training", False)),
        # Without autocast conditions in bf16 would meet weights in float32.
        ("dtype or autocast", transitions.dtype == torch.float32, _with([pipeline], "compute_dtype", other)),
        ("batched forward", transitions.is_even, _with([pipeline], "sampling", sampling)),
        ("timestep rounding", True, _rounded_timesteps(transformer)),
        (
            "activation checkpointing",
            transformer.gradient_checkpointing,
            _with([transformer], "gradient_checkpointing", False),
        ),
        ("compile", any(block._compiled_call_impl for block in layers), _with(layers, "_compiled_call_impl", None)),
        ("sequence parallelism", type(transformer.sequence) is not WholeSequence, _whole_sequence(transformer)),
    ]
    return {name: in_other_state for name, is_present, in_other_state in found if is_present}


def first_difference(transitions: Transitions, transformer: nn.Module) -> str | None:
    """The first module that differs on the last row: by more than rounding if any does, else at all."""
    with torch.no_grad():
        in_rollout = _outputs(transformer, transitions.replay_as_rollout)
    in_training = _outputs(transformer, transitions.replay)
    differences = [
        (name, (expected - output).abs().max().item(), expected.abs().max().item())
        for name, output in in_training.items()
        if (expected := in_rollout.get(name)) is not None and expected.shape == output.shape
    ]
    beyond_rounding = [one for one in differences if one[1] > _ROUNDING * one[2]]
    for name, off, _ in beyond_rounding or [one for one in differences if one[1] > 0]:
        return f"{name} ({type(transformer.get_submodule(name)).__name__}), by {off:.3g}"
    return None


def _outputs(transformer: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Output of each part for the last row of its batch, in the order of the first calls."""
    kept: dict[str, Tensor] = {}

    def hook(name: str):
        def keep(_module, _inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.ndim and first.numel():  # a part may be given no tokens at all
                kept[name] = first[-1].detach().float().cpu()

        return keep

    parts = {name: part for name, part in transformer.named_children() if not isinstance(part, nn.ModuleList)}
    parts |= {f"{family_of(transformer).blocks}.{i}": block for i, block in enumerate(blocks(transformer))}
    with ExitStack() as hooks:
        for name, part in parts.items():
            hooks.enter_context(part.register_forward_hook(hook(name)))
        run()
    return kept


@contextmanager
def _with(owners: Iterable[object], name: str, value: object) -> Iterator[None]:
    """Context in which each owner's attribute of that name has that value."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    for owner, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, kept in before:
            setattr(owner, name, kept)


@contextmanager
def _rounded_timesteps(transformer: nn.Module) -> Iterator[None]:
    """Context in which timesteps are rounded as a transformer in bf16 sees them: 937 becomes 936."""

    def rounded(_module, arguments, options):
        return arguments, options | {"timestep": options["timestep"].bfloat16().float()}

    with transformer.register_forward_pre_hook(rounded, with_kwargs=True):
        yield


@contextmanager
def _whole_sequence(transformer: nn.Module) -> Iterator[None]:
    before = transformer.sequence
    install(transformer)
    try:
        yield
    finally:
        install(transformer, before)
