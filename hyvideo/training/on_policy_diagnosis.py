"""Suspected causes of a failed on-policy check, which repeats a pass with one of them switched at a time."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import nn

from hyvideo.models.attention import WholeSequence
from hyvideo.models.family import blocks, install
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline


def suspects(
    pipeline: GRPOPipeline, conditions_dtype: torch.dtype, *, can_unbatch: bool
) -> dict[str, AbstractContextManager]:
    """Return a context manager that switches each possible cause, by name."""
    transformer, layers = pipeline.transformer, blocks(pipeline.transformer)
    sampling = replace(pipeline.sampling, batched_forward=not pipeline.sampling.batched_forward)
    other_dtype = torch.float32 if pipeline.compute_dtype != torch.float32 else torch.bfloat16
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in transformer.modules())
    checkpoints = transformer.gradient_checkpointing
    found = [
        ("dropout or train mode", transformer.training or has_dropout, _set(transformer.modules(), "training", False)),
        # Without autocast, bf16 conditions would meet float32 weights.
        ("dtype or autocast", conditions_dtype == torch.float32, _set([pipeline], "compute_dtype", other_dtype)),
        ("batched forward", can_unbatch, _set([pipeline], "sampling", sampling)),
        ("timestep rounding", True, _rounded_timesteps(transformer)),
        ("activation checkpointing", checkpoints, _set([transformer], "gradient_checkpointing", False)),
        ("compile", any(block._compiled_call_impl for block in layers), _set(layers, "_compiled_call_impl", None)),
        ("sequence parallelism", type(transformer.sequence) is not WholeSequence, _whole_sequence(transformer)),
    ]
    return {name: switch for name, is_present, switch in found if is_present}


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
