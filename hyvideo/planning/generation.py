"""Bytes on the GPU in every phase of generate.py, and the fastest way of offloading that fits.

    encode -> sample -> decode

With ``offloading`` each phase holds only the models that it uses. With ``group_offloading`` the
blocks of the transformer come one after another: that in use and the next one
(``overlap_group_offloading``), or four at a time. The language model then has one layer on the GPU.
"""

from hyvideo.data.text import lines_of
from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.advice import SMALL_TILE
from hyvideo.planning.memory import CONTEXT_GIB, Memory
from hyvideo.planning.planned_run import BYTES, PlannedRun
from hyvideo.planning.report import command, memory_table, video_row
from hyvideo.settings.offloading import Offloading


def ways(overlap: bool = True) -> list[Offloading]:
    """Return the ways of offloading, the fastest first; in groups with the given
    ``overlap_group_offloading``.
    """
    return [Offloading(False, False), Offloading(True, False), Offloading(True, True, overlap)]


def generation_memory(run: PlannedRun, way: Offloading) -> Memory:
    """Return the bytes by phase for one video of the size of the run's rollouts."""
    model, settings = run.architecture, run.settings
    parameters = model.parameters
    if way.group_offloading:
        # with overlap, the next block too
        blocks = 2 if way.overlap_group_offloading else way.blocks_per_group
        parameters = model.root_parameters + blocks * model.block_parameters
    vae = {"VAE": model.vae_parameters * BYTES[settings.vae_dtype]}
    transformer = {"transformer": parameters * run.compute_bytes}
    phases = {
        "encode": {"encoders": states.encoder_bytes(run, in_groups=way.group_offloading)}
        | (vae if run.has_images else {}),
        "sample": transformer | {"activations": activations.inference_bytes(run, 1)},
        "decode": vae | {"decoding": states.decoding_bytes(run)},
    }
    if not way.offloading:
        phases = {phase: items | vae for phase, items in phases.items()}
        phases["decode"] |= transformer
    return Memory(phases, CONTEXT_GIB)


def fastest_way(run: PlannedRun, overlap: bool = True) -> tuple[PlannedRun, Offloading] | None:
    """Return the fastest way of offloading that fits the GPU, with smaller tiles if necessary; None
    if none fits.
    """
    small = run.with_settings(
        vae_tile_size=min(SMALL_TILE, run.settings.vae_tile_size or SMALL_TILE)
    )
    choices = ((tiled, way) for tiled in (run, small) for way in ways(overlap))
    return next(
        (found for found in choices if generation_memory(*found).fits(run.hardware.gpu_memory)),
        None,
    )


def generation_report(run: PlannedRun, words: list[str], overlap: bool = True) -> str:
    """Return the memory of generate.py with the flags ``words``, and the command that fits the
    GPU.
    """
    found = fastest_way(run, overlap)
    planned, way = found or (run, ways(overlap)[-1])
    counted = generation_memory(planned, way)
    gpu_memory = run.hardware.gpu_memory
    rows = [video_row(run)]
    for other in ways(overlap):
        needed = generation_memory(run, other).needed_gib
        fits = "fits" if needed <= gpu_memory else "too large"
        rows.append((str(other), f"{needed:.1f} GiB, {fits}"))
    lines = [*lines_of(rows), "", *memory_table(counted), ""]
    size = f"{counted.needed_gib:.1f} of {gpu_memory:g} GiB"
    if found is None:
        lines.append(
            f"too large: {size}; no known change makes it fit; use fewer frames or a smaller size"
        )
        return "\n".join(lines)
    change = {"offloading": way.offloading, "group_offloading": way.group_offloading}
    tile = planned.settings.vae_tile_size
    if tile != run.settings.vae_tile_size:
        change["vae_tile_size"] = tile
    lines += lines_of([("command", command("python generate.py", words, change))])
    lines.append(f"fits: {size}, including CUDA context and fragmentation")
    return "\n".join(lines)
