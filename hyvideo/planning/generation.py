"""Bytes on the GPU and on the host in every phase of a program that samples videos in one process,
for each way of offloading.

    encode -> sample -> decode -> perhaps score

With offloading ``model`` each phase holds only the models that it uses, and of two experts only that
of the step. With ``group`` the blocks of the transformer come one after another: that in use and the
next one. The language model then has one layer on the GPU.
"""

from hyvideo.files.text import lines_of
from hyvideo.models.sizes import read_architecture
from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.hardware import hardware_of
from hyvideo.planning.memory import CONTEXT_GIB, GIB, Memory
from hyvideo.planning.planned_run import BYTES, PlannedRun
from hyvideo.planning.scorers import scorer_bytes, scoring_bytes
from hyvideo.settings.config import Config
from hyvideo.settings.offloading import Offloading
from hyvideo.settings.sampling import Sampling

WAYS: tuple[Offloading, ...] = ("none", "model", "group")
# GiB of GPU memory, as in the original; also in the help of generate.py and in docs/generate.md
GROUPS_BELOW = 60
PROCESS_GIB = 4.0  # of host memory: Python, torch and CUDA's libraries, estimated


def memory_lines(config: Config, sampling: Sampling, gpu: str) -> list[str]:
    """Return a line for each way of offloading: its GiB on the GPU and on the host, and whether it
    fits the GPU.

    Raises ValueError for an unknown GPU.
    """
    hardware = hardware_of(gpu)
    model = config.model
    architecture = read_architecture(model.pretrained_model_root, model.transformer_version)
    run = PlannedRun(config, 1, architecture, hardware=hardware)
    run = run.sampled_as(sampling, batch_size=1)
    rows = []
    for way in WAYS:
        needed = generation_memory(run, way).needed_gib
        fits = "fits" if needed <= hardware.gpu_memory else "too large"
        text = (
            f"{needed:.1f} of {hardware.gpu_memory:g} GiB, {host_gib(run, way):.0f} GiB on the host"
        )
        rows.append((f"offloading {way}", f"{text}, {fits}"))
    return lines_of(rows)


def automatic_way(run: PlannedRun, gpu_memory: float) -> Offloading:
    """Return the way of offloading that programs use on a GPU with ``gpu_memory`` GiB: groups below
    60 GiB; on a larger one none, or one expert at a time if two do not fit.
    """
    if gpu_memory < GROUPS_BELOW:
        return "group"
    has_experts = run.config.trained_expert is not None
    if has_experts and not generation_memory(run, "none").fits(gpu_memory):
        return "model"
    return "none"


def expert_bytes(run: PlannedRun) -> list[float]:
    """Return the bytes of the weights of each expert, or of a single transformer, as stored."""
    settings = run.settings
    weight_dtypes = [settings.base_weight_dtype]
    if run.config.trained_expert is not None:
        weight_dtypes.append(settings.partner_weight_dtype)
    total = run.parameters.total
    return [states.stored_bytes(run, total, weight_dtype) for weight_dtype in weight_dtypes]


def generation_memory(run: PlannedRun, way: Offloading, *, has_scorers: bool = False) -> Memory:
    """Return the bytes by phase for a batch of the run's rollouts, scored or not."""
    counted, settings = run.parameters, run.settings
    experts = expert_bytes(run)
    if way == "none":
        weights = sum(experts)
    elif way == "model":
        weights = max(experts)
    else:  # the block that computes, and the next one
        root = counted.root * run.compute_bytes
        weights = root + 2 * (max(experts) - root) / counted.num_blocks
    vae = {"VAE": counted.vae * BYTES[settings.vae_dtype]}
    transformer = {"transformer": weights}
    activation = {"activations": activations.inference_bytes(run, settings.batch_size)}
    if "fp8" in (settings.base_weight_dtype, settings.partner_weight_dtype):
        activation["working weights"] = states.dequantization_bytes(run)
    phases = {
        "encode": {"encoders": states.encoder_bytes(run, in_groups=way == "group")},
        "sample": transformer | activation,
        "decode": vae | {"decoding": states.decoding_bytes(run)},
    }
    if run.has_images:
        phases["encode"] |= vae
    if way == "none":
        phases = {phase: items | vae for phase, items in phases.items()}
        phases["decode"] |= transformer
    if has_scorers:
        _add_scorers(phases, run, way)
        if way == "none":
            phases["score"] |= transformer | vae
    return Memory(phases, CONTEXT_GIB)


def _add_scorers(phases: dict[str, dict[str, float]], run: PlannedRun, way: Offloading) -> None:
    """Add scorers to the phases, and a phase in which they score; held-out ones are away otherwise."""
    reward = run.config.reward
    weights = {"reward models": scorer_bytes(reward, reward.reward_model)}
    if way == "none" and "reward" not in run.settings.offload:
        for items in phases.values():
            items |= weights
    phases["score"] = weights | {
        "held-out reward models": scorer_bytes(reward, reward.held_out_reward_model),
        "scoring": scoring_bytes([*reward.reward_model, *reward.held_out_reward_model]),
    }


def host_gib(run: PlannedRun, way: Offloading, *, has_scorers: bool = False) -> float:
    """Return the peak GiB of host memory of the process: models that are not on the GPU.

    Tensors are read and pinned one by one; the encoders are freed before the transformer is loaded.
    """
    if way == "none":
        return PROCESS_GIB
    encoders = states.encoder_bytes(run) if way == "group" else 0.0
    peak = max(encoders, sum(expert_bytes(run)))
    peak += run.parameters.vae * BYTES[run.settings.vae_dtype]
    if has_scorers:
        reward = run.config.reward
        peak += scorer_bytes(reward, [*reward.reward_model, *reward.held_out_reward_model])
    return PROCESS_GIB + peak / GIB
