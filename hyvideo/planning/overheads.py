"""Seconds of an iteration outside of sampling, training passes, decoding and scoring, and of
saving.

    AdamW       reads and writes parameters and moments, after the gradients' norm and clipping
    Muon        five Newton-Schulz steps on every matrix, on every rank, after gathering it
    EMA         one interpolation per update; an offloaded copy comes to the GPU and goes back
    anchor      its weights are swapped in before its forward passes, and out after them
    check       two forward passes of nft, in one of ``gate_interval`` iterations

Offloaded copies cross PCIe from and to pinned memory. A checkpoint is copied to pageable memory
before it is written in the background.
"""

import math

from hyvideo.planning.network import Group
from hyvideo.planning.persistent import trained_bytes, trained_parameters
from hyvideo.planning.planned_run import PlannedRun

# Passes over the trained weights of a rank: AdamW reads four tensors and writes three; the
# gradients are read for their norm, and read and written by clipping.
_ADAM_PASSES = 7 + 3
_EMA_PASSES = 8  # interpolation, and the check that it moved towards the policy
_SWAP_PASSES = 6  # a temporary copy and two copies, read and written
_NEWTON_SCHULZ_STEPS = 5
# FLOPs of a step per parameter and row: four for the square of a matrix and the product with it,
# and 2 x rows / columns for the square's square. Hidden matrices are between square and four times
# wider than high.
_NEWTON_SCHULZ_FLOPS = 5
_MUON_BYTES = 100  # per parameter, in the steps and around them; estimated
# GB/s of copies from a GPU to pageable memory; published measurements have 2.6 to 6
_PAGEABLE = 3.0


def optimizer_seconds(run: PlannedRun) -> float:
    """Return the seconds of an optimizer step."""
    by_muon = muon_parameters(run)
    by_adam = 1 - by_muon / trained_parameters(run)
    hardware = run.hardware
    seconds = hardware.seconds("memory", _ADAM_PASSES * by_adam * trained_bytes(run))
    if by_muon:
        rows = run.settings.lora_rank or run.architecture.width
        seconds += hardware.seconds(
            "products", _NEWTON_SCHULZ_STEPS * _NEWTON_SCHULZ_FLOPS * rows * by_muon
        )
        seconds += hardware.seconds("memory", _MUON_BYTES * by_muon)
        shards = Group(run.num_shards, math.ceil(run.num_shards / hardware.gpus_per_node))
        seconds += shards.seconds(by_muon * run.master_bytes, hardware)
    return seconds


def muon_parameters(run: PlannedRun) -> int:
    """Return the number of parameters that Muon trains."""
    if not run.settings.use_muon:
        return 0
    if run.settings.muon_scope == "all":
        return trained_parameters(run)
    return 0 if run.settings.lora_rank else run.architecture.matrix_parameters


def ema_seconds(run: PlannedRun) -> float:
    """Return the seconds to update the EMA after an optimizer step; 0 without an EMA."""
    if not run.settings.ema_decay:
        return 0.0
    size = trained_bytes(run)
    copied = 2 * size if run.settings.reference_mode_offload else 0.0
    return run.hardware.seconds("memory", _EMA_PASSES * size) + run.hardware.copy_seconds(copied)


def anchor_seconds(run: PlannedRun) -> float:
    """Return the seconds of an iteration to swap the anchor in and out; 0 without an anchor."""
    if not run.anchor_forwards:
        return 0.0
    size = trained_bytes(run)
    if run.settings.reference_mode_offload:
        return run.hardware.copy_seconds(2 * 2 * size)
    return run.hardware.seconds("memory", 2 * _SWAP_PASSES * size)


def pageable_seconds(size: float) -> float:
    """Return the seconds to copy bytes from a GPU to pageable host memory."""
    return size / (_PAGEABLE * 1e9)
