"""Diagnosis of a failed on-policy check: the worst pass is repeated with one suspected cause switched at a time."""

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

_ROUNDING = 1e-4  # largest relative difference explained by rounding


@dataclass(frozen=True)
class Transitions:
    """Stored transitions and the functions that recompute them as in the update and as in the rollout."""

    replay: Callable[[], Tensor]  # log-probabilities of the training path, with gradient; (batch,)
    replay_as_rollout: Callable[[], Tensor]  # log-probability of the last row in its rollout batch, no gradient; ()
    log_probs: Tensor  # recorded by the rollout; (batch,)
    dtype: torch.dtype  # of the conditions
    is_even: bool  # all ranks replay the same number of rows, so that FSDP ranks may replay row by row
    shapes: str | None  # shapes of the transformer calls in rollout and update, if they differ

    def deviation(self) -> float:
        """Return the largest |log ratio| of the training path."""
        return (self.replay().detach() - self.log_probs).abs().max().item()


def explain(transitions: Transitions, pipeline: GRPOPipeline, *, tolerance: float, rank: int, iteration: int) -> str:
    """Return the error message, with deviation, causes and the first module that differs. All ranks must call this."""
    measured = transitions.deviation()
    with torch.no_grad():
        same_batch = (transitions.replay_as_rollout() - transitions.log_probs[-1]).abs().item()
    deviations = {}
    for name, switch in suspects(transitions, pipeline).items():
        with switch:
            deviations[name] = transitions.deviation()
    return fill(
        Path(__file__).with_suffix(".txt.jinja"),
        iteration=iteration,
        rank=rank,
        measured=measured,
        tolerance=tolerance,
        shapes=transitions.shapes,
        same_batch=same_batch,
        causes={name: deviation for name, deviation in deviations.items() if deviation <= tolerance},
        where=first_difference(transitions, pipeline.transformer),
    )


def suspects(transitions: Transitions, pipeline: GRPOPipeline) -> dict[str, AbstractContextManager]:
    """Return a context manager that switches each possible cause, by name; the batch shape is tested separately."""
    transformer, layers = pipeline.transformer, blocks(pipeline.transformer)
    sampling = replace(pipeline.sampling, batched_forward=not pipeline.sampling.batched_forward)
    other_dtype = torch.float32 if pipeline.compute_dtype != torch.float32 else torch.bfloat16
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in transformer.modules())
    found = [
        ("dropout or train mode", transformer.training or has_dropout, _set(transformer.modules(), "training", False)),
        # Without autocast, bf16 conditions would meet float32 weights.
        ("dtype or autocast", transitions.dtype == torch.float32, _set([pipeline], "compute_dtype", other_dtype)),
        ("batched forward", transitions.is_even, _set([pipeline], "sampling", sampling)),
        ("timestep rounding", True, _rounded_timesteps(transformer)),
        (
            "activation checkpointing",
            transformer.gradient_checkpointing,
            _set([transformer], "gradient_checkpointing", False),
        ),
        ("compile", any(block._compiled_call_impl for block in layers), _set(layers, "_compiled_call_impl", None)),
        ("sequence parallelism", type(transformer.sequence) is not WholeSequence, _whole_sequence(transformer)),
    ]
    return {name: switch for name, is_present, switch in found if is_present}


def first_difference(transitions: Transitions, transformer: nn.Module) -> str | None:
    """Return the first module whose output for the last row differs, preferably by more than rounding."""
    with torch.no_grad():
        in_rollout = _outputs(transformer, transitions.replay_as_rollout)
    in_training = _outputs(transformer, transitions.replay)
    differences = [
        (name, (expected - output).abs().max().item(), expected.abs().max().item())
        for name, output in in_training.items()
        if (expected := in_rollout.get(name)) is not None and expected.shape == output.shape
    ]
    beyond_rounding = [entry for entry in differences if entry[1] > _ROUNDING * entry[2]]
    for name, difference, _ in beyond_rounding or [entry for entry in differences if entry[1] > 0]:
        return f"{name} ({type(transformer.get_submodule(name)).__name__}), by {difference:.3g}"
    return None


def _outputs(transformer: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return each module's output for the last row of its batch, in the order of the first calls."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str):
        def store(_module, _inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.ndim and first.numel():  # a module may receive no tokens
                outputs[name] = first[-1].detach().float().cpu()

        return store

    parts = {name: part for name, part in transformer.named_children() if not isinstance(part, nn.ModuleList)}
    parts |= {f"{family_of(transformer).blocks}.{i}": block for i, block in enumerate(blocks(transformer))}
    with ExitStack() as hooks:
        for name, part in parts.items():
            hooks.enter_context(part.register_forward_hook(hook(name)))
        run()
    return outputs


@contextmanager
def _set(owners: Iterable[object], name: str, value: object) -> Iterator[None]:
    """Set attribute ``name`` of each owner to ``value`` within the context."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    for owner, _ in before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, previous in before:
            setattr(owner, name, previous)


@contextmanager
def _rounded_timesteps(transformer: nn.Module) -> Iterator[None]:
    """Round timesteps to bf16 within the context: 937 becomes 936."""

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
