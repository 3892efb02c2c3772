"""Memory of a run and of the programs that follow it on the same card: what trained on a card is
validated, sampled and evaluated there.

The programs after the training run on one GPU.
"""

from dataclasses import dataclass, replace

from hyvideo.files.text import Row
from hyvideo.models.placement import Weights
from hyvideo.models.versions import version_defaults
from hyvideo.planning.disk import rank_checkpoint_bytes
from hyvideo.planning.generation import PROCESS_GIB, automatic_way, generation_memory, host_gib
from hyvideo.planning.memory import GIB, Memory, memory
from hyvideo.planning.persistent import pinned_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.scorers import scorer_bytes

TILE = 128  # pixels; smaller tiles have visible seams

_CHANGE = "with --gpu, --print_config has a command that fits, if there is one"


@dataclass(frozen=True)
class Need:
    """What a program needs of the card and of the host."""

    program: str
    gpu_gib: float
    host_gib: float
    remedy: str  # what to set if it does not fit the card
    note: str = ""

    def describe(self, gpu_memory: float) -> str:
        text = f"{self.program}: {self.gpu_gib:.1f} of {gpu_memory:.4g} GiB"
        text += f", {self.host_gib:.0f} GiB on the host"
        if self.note:
            text += f" ({self.note})"
        if self.gpu_gib > gpu_memory:
            text += f"; TOO LARGE: {self.remedy}"
        return text


def chain_rows(run: PlannedRun) -> list[Row]:
    """Return a row for the training and for each program that follows it."""
    rows = []
    for need in chain(run):
        rows.append(("" if rows else "memory", need.describe(run.hardware.gpu_memory)))
    return rows


def chain(run: PlannedRun) -> list[Need]:
    """Return the needs of the training, of its validation, and of generate.py, scripts.evaluate and,
    for the objective that fine-tunes on videos, of the sampling of scripts.improve.
    """
    planned = memory(run)
    phases = dict(planned.phases)
    validation = phases.pop("validation", None)
    host = training_host_gib(run)
    needs = [
        Need(
            "training",
            Memory(phases, planned.context_gib).needed_gib,
            host,
            _CHANGE,
        )
    ]
    if validation:
        needs.append(
            Need(
                "validation",
                Memory({"validation": validation}, planned.context_gib).needed_gib,
                host,
                _CHANGE,
            )
        )
    alone = replace(run, world_size=1).with_settings(enable_fsdp=False, sp_size=1)
    sampling = run.config.validation_sampling
    batch_size = run.config.validation.validation_batch_size
    video = alone.sampled_as(sampling, batch_size=1)
    needs.append(_sampling_need("generate.py", video))
    if run.reward_bytes or run.config.data.valid_video_csv:
        videos = alone.sampled_as(sampling, batch_size=batch_size)
        needs.append(_sampling_need("scripts.evaluate", videos, has_scorers=True))
    if run.config.objective.name == "sft":
        guidance = version_defaults(run.settings.transformer_version).guidance_scale
        guided = replace(
            run.config.ode_sampling,
            guidance_scale=guidance,
            low_noise_guidance_scale=guidance,
        )
        needs.append(_sampling_need("scripts.improve", alone.sampled_as(guided, batch_size=1)))
    return needs


def training_host_gib(run: PlannedRun) -> float:
    """Return the peak GiB of host memory of a node: offloaded models of all ranks, and the copy from
    which a checkpoint is written.
    """
    reward = run.config.reward
    num_local = min(run.world_size, run.hardware.gpus_per_node)
    away = sum(pinned_bytes(run).values())
    away += Weights(run.reward_bytes).on_host(run.config.placements.scorers)
    if run.validation:
        away += scorer_bytes(reward, reward.held_out_reward_model)
    written = min(num_local, run.num_shards) * rank_checkpoint_bytes(run)
    return num_local * PROCESS_GIB + (num_local * away + written) / GIB


def _sampling_need(program: str, run: PlannedRun, *, has_scorers: bool = False) -> Need:
    """Return what a program needs that samples videos as the rollouts of ``run``, offloaded as it does
    on this card.
    """
    card = run.hardware.gpu_memory
    way = automatic_way(run, card, has_scorers=has_scorers)
    planned = generation_memory(run, way, has_scorers=has_scorers)
    host = host_gib(run, way, has_scorers=has_scorers)
    note = "" if way == "none" else f"offloading {way}"
    remedy = "smaller videos, or a larger GPU"
    changes = {
        "lower validation_batch_size": run.with_settings(batch_size=1),
        f"--vae_tile_size {TILE}": run.with_settings(vae_tile_size=TILE),
    }
    for change, changed in changes.items():
        if generation_memory(changed, way, has_scorers=has_scorers).fits(card):
            remedy = change
            break
    return Need(program, planned.needed_gib, host, remedy, note)
