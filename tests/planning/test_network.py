"""Bytes exchanged by ranks, counted by forward passes and by link."""

from pathlib import Path

import pytest

from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.network import Group, traffic
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "hunyuanvideo15_480p_64gpu.yaml"
WEIGHTS = 2 * Architecture().parameters
TOGETHER = {"batched_forward": True}


def sampling(traffic):
    """Return the bytes gathered for passes without gradient."""
    return traffic.gathered["rollout"] + traffic.gathered["anchor"]


def sent(world_size=64, **changes):
    changes = {"dp_replicate": 1, "sp_size": 2, "batch_size": 2} | changes
    return traffic(PlannedRun(load_config(CONFIG, **changes), world_size, Architecture()))


def test_64_shards_receive_3_6_tb_per_batched_iteration_and_twice_as_much_unbatched():
    """Batched: 20 steps, 40 anchor passes, and 40 training passes that gather twice and reduce
    float32 once.
    """
    together = sent(**TOGETHER)
    assert (sampling(together), together.gathered["update"]) == (60 * WEIGHTS, 80 * WEIGHTS)
    assert together.reduced == 80 * WEIGHTS
    assert together.received - together.exchanged == pytest.approx(3.6e12, rel=0.01)
    apart = sent()
    assert (sampling(apart), apart.gathered["update"], apart.reduced) == (
        160 * WEIGHTS,
        160 * WEIGHTS,
        160 * WEIGHTS,
    )


def test_anchor_fraction_and_nft_gather_less():
    assert sampling(sent(**TOGETHER, anchor_fraction=0.25)) == (20 + 10) * WEIGHTS
    nft = TOGETHER | {"objective": "nft", "nft_levels": 4}
    assert (sampling(sent(**nft)), sent(**nft).gathered["update"]) == (
        (20 + 8) * WEIGHTS,
        16 * WEIGHTS,
    )
    # with old velocities
    assert sampling(sent(**nft, num_updates_per_rollout=2)) == (20 + 8 + 4 + 1) * WEIGHTS
    assert sampling(sent(**nft, kl_weight=0.0)) == 20 * WEIGHTS
    guided = {"objective": "nft", "nft_levels": 4, "cfg_scale": 1.0, "anchor_cfg_scale": 6.0}
    # two rollouts per batch, two branches of the anchor
    assert sampling(sent(**guided)) == (20 + 2 * 4) * 2 * WEIGHTS


def test_shards_within_a_node_send_only_the_gradients_of_an_update_to_other_nodes():
    run = sent(dp_replicate=8, **TOGETHER)
    assert (run.shards, run.replicas) == (Group(8, 1), Group(8, 8))
    assert run.averaged == 2 * 2 * WEIGHTS / 8
    assert run.from_other_nodes == run.averaged * 7 / 8 < sent(**TOGETHER).from_other_nodes / 50


def test_kept_or_unsharded_weights_are_not_gathered():
    kept = sent(reshard_after_forward=False, **TOGETHER)
    assert (sampling(kept), kept.gathered["update"]) == (2 * WEIGHTS, 40 * WEIGHTS)
    whole = sent(enable_fsdp=False)
    assert whole.shards.received(sampling(whole)) == 0 and whole.replicas == Group(64, 8)
    assert sent(1, sp_size=1, batch_size=4).received == 0


def test_a_lora_reduces_its_gradients_once_per_update():
    lora = sent(lora_rank=64)
    assert lora.reduced == 4 * Architecture().lora_parameters(64) and sampling(lora) == sampling(
        sent()
    )


@pytest.mark.parametrize("sp_size, part", [(1, 0), (2, 1 / 2 / 2), (4, 3 / 4 / 4)])
def test_sequence_parallelism_exchanges_the_tokens_of_other_ranks_and_heads(sp_size, part):
    steps = 20 + 20 + 3 * 20
    tokens = 2 * 2 * steps * 54 * 4 * 21 * 22 * 39 * 2048 * 2
    assert sent(sp_size=sp_size).exchanged == pytest.approx(part * tokens)


def test_a_ring_is_as_fast_as_its_slowest_link_and_uses_all_network_cards():
    hardware = Hardware(link=400.0, network=50.0)
    assert Group(8, 1).seconds(8e9, hardware) == pytest.approx(7 / 400)
    # 56 GB over 8 cards take as long
    assert Group(64, 8).seconds(64e9, hardware) == pytest.approx(63 / 400)
    assert Group(64, 8).seconds(64e9, Hardware(network=5.0)) == pytest.approx(56 / 40)
    assert Group(8, 8).seconds(8e9, hardware) == pytest.approx(7 / 50)
