"""Bytes on the GPU in every phase of generate.py, for each way of offloading.

    encode -> sample -> decode

With offloading ``model`` each phase holds only the models that it uses. With ``group`` the blocks of
the transformer come one after another: that in use and the next one. The language model then has one
layer on the GPU.
"""

from hyvideo.files.text import lines_of
from hyvideo.models.sizes import read_architecture
from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.hardware import hardware_of
from hyvideo.planning.memory import CONTEXT_GIB, Memory
from hyvideo.planning.planned_run import BYTES, PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.offloading import Offloading

WAYS: tuple[Offloading, ...] = ("none", "model", "group")


def memory_lines(config: Config, gpu: str) -> list[str]:
    """Return a line for each way of offloading: its GiB, and whether it fits a GPU. The video has the
    size of the config's rollouts.

    Raises ValueError for an unknown GPU.
    """
    hardware = hardware_of(gpu)
    model = config.model
    architecture = read_architecture(model.pretrained_model_root, model.transformer_version)
    run = PlannedRun(config, 1, architecture, hardware=hardware)
    rows = []
    for way in WAYS:
        needed = generation_memory(run, way).needed_gib
        fits = "fits" if needed <= hardware.gpu_memory else "too large"
        rows.append((f"offloading {way}", f"{needed:.1f} of {hardware.gpu_memory:g} GiB, {fits}"))
    return lines_of(rows)


def generation_memory(run: PlannedRun, way: Offloading) -> Memory:
    """Return the bytes by phase for one video of the size of the run's rollouts."""
    counted, settings = run.parameters, run.settings
    parameters = counted.total
    if way == "group":  # the block that computes, and the next one
        parameters = counted.root + 2 * counted.block
    vae = {"VAE": counted.vae * BYTES[settings.vae_dtype]}
    transformer = {"transformer": parameters * run.compute_bytes}
    phases = {
        "encode": {"encoders": states.encoder_bytes(run, in_groups=way == "group")},
        "sample": transformer | {"activations": activations.inference_bytes(run, 1)},
        "decode": vae | {"decoding": states.decoding_bytes(run)},
    }
    if run.has_images:
        phases["encode"] |= vae
    if way == "none":
        phases = {phase: items | vae for phase, items in phases.items()}
        phases["decode"] |= transformer
    return Memory(phases, CONTEXT_GIB)
