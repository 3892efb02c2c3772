"""Bytes on the GPU and on the host in every phase of a program that samples videos in one process,
for each way of offloading.

    encode -> sample -> decode -> perhaps score

`Placements.of_sampling` says where the models are in each way.
"""

from hyvideo.files.text import lines_of
from hyvideo.models.placement import Offloading, Placement, Placements, Weights, taking_turns
from hyvideo.models.sizes import read_architecture
from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.hardware import hardware_of
from hyvideo.planning.memory import CONTEXT_GIB, GIB, Memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.scorers import scorer_bytes, scoring_bytes
from hyvideo.settings.config import Config
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


def automatic_way(run: PlannedRun, gpu_memory: float, *, has_scorers: bool = False) -> Offloading:
    """Return the way of offloading that programs use on a GPU with ``gpu_memory`` GiB: groups below
    60 GiB; on a larger one none, or one model at a time if all do not fit.
    """
    if gpu_memory < GROUPS_BELOW:
        return "group"
    if generation_memory(run, "none", has_scorers=has_scorers).fits(gpu_memory):
        return "none"
    return "model"


def experts(run: PlannedRun, placements: Placements) -> list[tuple[Weights, Placement]]:
    """Return the weights of each expert, or of a single transformer, as stored, and where they are."""
    settings = run.settings
    found = [(states.expert_weights(run, settings.base_weight_dtype), placements.policy)]
    if run.config.trained_expert is not None:
        weights = states.expert_weights(run, settings.partner_weight_dtype)
        found.append((weights, placements.partner))
    return found


def generation_memory(run: PlannedRun, way: Offloading, *, has_scorers: bool = False) -> Memory:
    """Return the bytes by phase for a batch of the run's rollouts, scored or not."""
    settings, reward = run.settings, run.config.reward
    placements = Placements.of_sampling(way)
    vae = states.vae_weights(run)
    scorers = Weights(scorer_bytes(reward, reward.reward_model) if has_scorers else 0.0)
    in_groups = placements.encoders == Placement.BLOCKS
    activation = {"activations": activations.inference_bytes(run, settings.batch_size)}
    if "fp8" in (settings.base_weight_dtype, settings.partner_weight_dtype):
        activation["working weights"] = states.dequantization_bytes(run)
    loaded = experts(run, placements)
    held = {
        "transformer": sum(weights.on_gpu(place, is_used=False) for weights, place in loaded),
        "VAE": vae.on_gpu(placements.vae, is_used=False),
        "reward models": scorers.on_gpu(placements.scorers, is_used=False),
    }
    phases = {
        # before the transformer is loaded
        "encode": held
        | {"transformer": 0.0, "encoders": states.encoder_bytes(run, in_groups=in_groups)},
        "sample": held | {"transformer": taking_turns(loaded)} | activation,
        "decode": held | {"VAE": vae.total, "decoding": states.decoding_bytes(run)},
    }
    if run.has_images:
        phases["encode"]["VAE"] = vae.total
    if has_scorers:  # held-out ones are away otherwise
        phases["score"] = held | {
            "reward models": scorers.total,
            "held-out reward models": scorer_bytes(reward, reward.held_out_reward_model),
            "scoring": scoring_bytes([*reward.reward_model, *reward.held_out_reward_model]),
        }
    return Memory(
        {
            phase: {item: size for item, size in items.items() if size}
            for phase, items in phases.items()
        },
        CONTEXT_GIB,
    )


def host_gib(run: PlannedRun, way: Offloading, *, has_scorers: bool = False) -> float:
    """Return the peak GiB of host memory of the process: models that are not on the GPU.

    Tensors are read one by one and pinned one by one, or block by block; the encoders are freed before
    the transformer is loaded.
    """
    reward = run.config.reward
    placements = Placements.of_sampling(way)
    encoders = Weights(states.encoder_bytes(run)).on_host(placements.encoders)
    loaded = experts(run, placements)
    transformers = sum(weights.on_host(place) for weights, place in loaded)
    transformers += max(weights.while_put(place) for weights, place in loaded)
    peak = max(encoders, transformers) + states.vae_weights(run).on_host(placements.vae)
    if has_scorers:
        peak += Weights(scorer_bytes(reward, reward.reward_model)).on_host(placements.scorers)
        peak += scorer_bytes(reward, reward.held_out_reward_model)
    return PROCESS_GIB + peak / GIB
