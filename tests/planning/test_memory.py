"""Memory per rank against a simulation of the real model (fake tensors and FSDP's memory tracker),
in GiB.
"""

from dataclasses import replace

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning import activations
from hyvideo.planning.flops import count_parameters
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import GIB, memory, resolve_auto
from hyvideo.planning.persistent import decoding_bytes, pinned_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config
from tests.planning.simulated import LORA, simulated, transformer_gib, with_layers
from tests.planning.simulated import RELEASED as RELEASED_SIZES

RELEASED = count_parameters(RELEASED_SIZES)

# 6 blocks, 480p, 121 frames, full checkpointing, bf16 anchor; query and key norms keep the
# activations of CUDA's norm.
SIMULATED = [
    (6.47, 8, 8, {"activation_checkpointing": "none"}),
    (9.76, 8, 1, {}),
    (3.16, 64, 8, {}),
    (10.19, 8, 1, {"activation_checkpointing": "selective"}),
    (4.68, 8, 2, LORA),
]


@pytest.mark.parametrize("gib, world_size, sp_size, changes", SIMULATED)
def test_peaks_match_the_simulation(gib, world_size, sp_size, changes):
    run = with_layers(simulated(world_size, sp_size=sp_size, **changes), 6)
    assert transformer_gib(run) == pytest.approx(gib, rel=0.07)


@pytest.mark.parametrize(
    "frames, height, width, gib",
    [(81, 256, 256, 4.48), (121, 480, 848, 45.6)],
)
def test_decoding_matches_the_simulated_vae(frames, height, width, gib):
    run = simulated(sample_n_frames=frames, height=height, width=width, vae_tile_size=0)
    assert decoding_bytes(run) / GIB == pytest.approx(gib, rel=0.02)


def test_auto_checkpointing_is_the_fastest_that_fits():
    auto, needed = simulated(activation_checkpointing="auto"), {}
    for kind in ("none", "selective", "full"):
        needed[kind] = memory(simulated(activation_checkpointing=kind)).needed_gib
    assert needed["none"] > needed["selective"] + 0.1 > needed["full"] + 0.2
    for gib, kind in (
        (needed["none"] / 0.9 + 0.1, "none"),
        (needed["none"] / 0.9 - 0.1, "selective"),
        (needed["selective"], "selective"),
        (needed["selective"] - 0.1, "full"),
        (1.0, "full"),
    ):
        run = replace(auto, hardware=Hardware(gpu_memory=gib))
        assert resolve_auto(run).checkpointing == kind and memory(run).needed_gib == needed[kind]
    assert resolve_auto(auto.with_settings(device="cpu")).checkpointing == "full"
    assert resolve_auto(auto.with_settings(activation_checkpointing="none")).checkpointing == "none"


def test_states_are_bytes_per_parameter():
    items = memory(simulated(ema_decay=0.99)).phases["backward ends"]
    share = RELEASED.total / 8
    sizes = {"parameters": 4, "gradients": 4, "optimizer state": 8, "EMA": 4, "anchor": 4}
    assert {name: items[name] / share for name in sizes} == sizes


@pytest.mark.parametrize(
    "changes, sizes",
    [
        ({"optimizer": "muon_all"}, {"optimizer state": 4}),
        ({"kl_weight": 0.0}, {"anchor": 0}),
        ({"offload": ["anchor"]}, {"anchor": 0}),
    ],
)
def test_settings_change_the_bytes_per_parameter(changes, sizes):
    items = memory(simulated(**changes)).phases["backward ends"]
    assert {name: items[name] * 8 / RELEASED.total for name in sizes} == sizes


def test_an_offloaded_anchor_and_ema_take_no_gpu_memory():
    offloaded = memory(simulated(offload=["anchor"], ema_decay=0.99))
    for items in offloaded.phases.values():
        assert items["anchor"] == items["EMA"] == 0
    share = 4 * RELEASED.total / 8
    offloaded = {"offload": ["anchor"]}
    assert pinned_bytes(simulated(**offloaded, ema_decay=0.99)) == {"anchor": share, "EMA": share}
    assert (
        pinned_bytes(simulated(**offloaded, kl_weight=0.0))
        == pinned_bytes(simulated(ema_decay=0.99))
        == {}
    )
    one_gpu = simulated(1, **LORA, enable_fsdp=False)
    assert pinned_bytes(one_gpu) == {"modulation layers": 2 * 2 * 54 * (2048 + 1) * 6 * 2048}
    away = pinned_bytes(one_gpu.with_settings(offload=["policy", "reward"]))
    assert away["policy"] + away["modulation layers"] == 2 * RELEASED.total


def test_accumulated_gradients_coexist_with_the_next_activations():
    """The simulation has one backward pass per update, a run has many."""
    single, many = (
        memory(simulated(timestep_fraction=n / 20)).phases["backward begins"] for n in (1, 20)
    )
    assert single["gradients"] == 0
    assert many["gradients"] == pytest.approx(4 * RELEASED.total / 8)


def test_guidance_in_two_passes_keeps_both_inputs_and_recomputes_one():
    single, *both = (
        simulated(cfg_scale=scale, batched_forward=batch)
        for scale, batch in ((1, True), (6, True), (6, False))
    )
    for run in both:
        assert activations.kept_bytes(run) == 2 * activations.kept_bytes(single)
    together, apart = (activations.block_bytes(run) for run in both)
    assert together == 2 * apart == 2 * activations.block_bytes(single)


def test_trajectories_are_float32_latents_means_and_anchor_means():
    run = simulated(batch_size=2, timestep_fraction=1.0, sp_size=8)
    latent = 32 * 31 * 30 * 53 * 4
    assert memory(run).phases["decode"]["trajectories"] == 2 * (21 + 20 + 20) * latent
    less = run.with_settings(anchor_fraction=0.25)
    assert memory(less).phases["decode"]["trajectories"] == 2 * (21 + 20 + 5) * latent


def test_trajectories_of_nft_are_three_latents_and_the_velocities_of_its_levels():
    run = simulated(batch_size=2, sp_size=8).with_settings(objective="nft", nft_levels=4)
    latent = 32 * 31 * 30 * 53 * 4
    # half of the old velocities, and one for the check
    several = run.with_settings(num_updates_per_rollout=2)
    without = several.with_settings(kl_weight=0.0)
    found = [
        memory(each).phases["decode"]["trajectories"] / 2 / latent
        for each in (run, several, without)
    ]
    assert found == [3 + 4, 3 + 4 + 2 + 0.5, 3 + 2 + 0.5]
    one_step = run.with_settings(grpo_sampling_steps=1)
    assert memory(one_step).phases["decode"]["trajectories"] / 2 / latent == 2 + 4


def test_precomputed_conditions_need_encoders_only_before_the_transformer_is_loaded():
    resident, before = memory(simulated()), memory(simulated(precompute_conditions=True))
    assert resident.phases["decode"]["encoders"] / GIB == pytest.approx(14.0, rel=0.01)
    assert before.phases["decode"]["encoders"] == 0 and "encode" not in resident.phases
    assert before.phases["encode"].keys() == {"encoders", "VAE", "reward models"}
    offloaded = {"precompute_conditions": True, "offload": ["vae", "reward"]}
    assert memory(simulated(**offloaded)).phases["encode"].keys() == {"encoders"}
    with_images = simulated(**offloaded, transformer_version="480p_i2v")
    assert memory(with_images).phases["encode"].keys() == {"encoders", "VAE"}


def phases_with(item, **changes):
    """Return the phases in which an item is on the GPU."""
    run = simulated(valid_video_csv=["assets/prompts/valid.csv"], **changes)
    return {phase for phase, items in memory(run).phases.items() if items.get(item)}


ALL = {"rollout", "decode", "anchor", "backward begins", "backward ends", "optimizer", "validation"}
SCORED = {"reward_model": ["videoalign"]}


def test_an_offloaded_vae_is_on_the_gpu_only_to_decode():
    assert phases_with("VAE") == ALL
    assert phases_with("VAE", offload=["vae"]) == {"decode", "validation"}
    sampling = {
        "offload": ["vae"],
        "vae_tile_size": 64,
        "batched_forward": True,
        "validation_batch_size": 8,
    }
    assert phases_with("VAE", **sampling) == {"decode"}  # sampling is then the peak of a validation


def test_scorers_run_beside_other_phases_or_between_them():
    assert phases_with("reward models", **SCORED) == ALL
    assert phases_with("scoring", **SCORED) == {"rollout", "decode", "anchor"}
    between = SCORED | {"offload": ["reward"]}
    assert phases_with("reward models", **between) == phases_with("scoring", **between) == {"score"}
    held_out = {"held_out_reward_model": ["videoalign"]} | {"offload": ["vae"]}
    small = {
        "validation_height": 256,
        "validation_width": 256,
        "vae_tile_size": 64,
    }
    assert phases_with("held-out reward models", **held_out, **small) == {"validation"}
    # the options of a scorer that is not held out
    options = {"reward_model": ["hpsv3"], "reward_config": '{"hpsv3": {"num_frames": 4}}'}
    assert phases_with("held-out reward models", **options) == set()
    assert phases_with("scoring", **options) == {"rollout", "decode", "anchor"}
    remote = between | {"reward_model": ["remote"]}
    assert not phases_with("reward models", **remote) and not phases_with("scoring", **remote)


def test_fp8_stores_a_byte_per_frozen_matrix_weight_and_a_scale_per_row():
    bf16, fp8 = (
        memory(simulated(**LORA, enable_fsdp=False, base_weight_dtype=kind))
        for kind in ("bf16", "fp8")
    )
    saved = bf16.phases["rollout"]["parameters"] - fp8.phases["rollout"]["parameters"]
    assert saved == pytest.approx(RELEASED.matrices, rel=0.003)
    one_matrix = 4 * 2048 * 2048
    assert one_matrix * 2 < fp8.phases["rollout"]["working weights"] < one_matrix * 12


def test_compiled_blocks_without_recomputation_keep_dequantized_matrices():
    """Inductor saves them for the backward pass, which eager blocks and recomputation do not."""
    settings = LORA | {"base_weight_dtype": "fp8", "activation_checkpointing": "none"}

    def begins(**changes):
        run = simulated(1, **settings | changes)
        return memory(run).total("backward begins")

    compiled, eager = begins(enable_compile="true"), begins(enable_compile="false")
    assert compiled - eager == 2 * RELEASED.matrices
    full = {"activation_checkpointing": "full"}
    assert begins(enable_compile="true", **full) == begins(enable_compile="false", **full)


def test_an_expert_without_guidance_keeps_the_inputs_of_one_branch():
    """Only the other expert is guided, as in the validation of a fine-tuning."""
    config = load_config("configs/wan22_a14b_1gpu_sft.yaml")
    run = PlannedRun(config, 1, released_sizes(config.model.transformer_version))
    own, other = "cfg_scale", "low_noise_cfg_scale"
    plain, guided_other, guided = (
        activations.kept_bytes(resolve_auto(run.with_settings(**scales)))
        for scales in ({own: 1.0, other: 1.0}, {own: 1.0, other: 4.0}, {own: 4.0, other: 1.0})
    )
    assert plain == guided_other == guided / 2
