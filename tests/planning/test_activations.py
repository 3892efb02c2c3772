"""Activations and FLOPs of a block, compared with those of the real block on a simulated GPU."""

from dataclasses import replace

import pytest

from hyvideo.planning import activations
from hyvideo.planning.hours import training_flops
from tests.fake_cuda.counting import counted as counted_by
from tests.planning.simulated import BLOCK_TEXT, simulated, with_layers

pytestmark = pytest.mark.system

SIZE = {"sample_n_frames": 81, "height": 480, "width": 864}
RUNS = {
    "all": replace(with_layers(simulated(**SIZE), 1), text_tokens=BLOCK_TEXT),
    "lora": replace(with_layers(simulated(**SIZE, lora_rank=32), 1), text_tokens=BLOCK_TEXT),
}
INPUT = (
    activations.tokens_outside_attention(RUNS["all"]) * 2048 * 2
)  # of a block; also the size of its output and gradient
KINDS = pytest.mark.parametrize("kind", RUNS)


@pytest.fixture(scope="module")
def counted():
    """Bytes and FLOPs of forward and backward passes, by trained weights and activation
    checkpointing.
    """
    return counted_by("tests.planning.counted_block")


def test_kept_bytes_of_a_block_match_its_forward_pass(counted):
    kept = {
        kind: activations.kept_bytes(run.with_settings(activation_checkpointing="none"))
        for kind, run in RUNS.items()
    }
    assert kept["all"] == pytest.approx(counted["all trained"]["kept"], rel=0.02)
    # inputs of frozen weights are not kept
    assert 1 < kept["lora"] / counted["lora trained"]["kept"] < 1.12


@KINDS
def test_a_recomputed_block_keeps_its_input(counted, kind):
    assert activations.kept_bytes(RUNS[kind]) == pytest.approx(
        counted[f"{kind} recomputed"]["kept"], rel=0.01
    )


@KINDS
def test_inference_bytes_match_the_allocations_of_a_forward_pass(counted, kind):
    held = counted[f"{kind} sampled"]["forward"] + INPUT
    assert activations.inference_bytes(RUNS[kind], 1) == pytest.approx(held, rel=0.03)


@KINDS
def test_block_bytes_match_the_allocations_of_a_backward_pass(counted, kind):
    weights = 2 * (
        simulated().parameters.block
        if kind == "all"
        else 32 * simulated().parameters.per_lora_rank / 54
    )
    held = counted[f"{kind} recomputed"]["backward"] + INPUT - weights
    assert activations.block_bytes(RUNS[kind]) == pytest.approx(held, rel=0.03)
    apart = RUNS[kind].with_settings(activation_checkpointing="none")
    assert activations.block_bytes(apart) < activations.block_bytes(RUNS[kind]) / 2


@KINDS
@pytest.mark.parametrize(
    "way, checkpointing",
    [("trained", "none"), ("selective", "selective"), ("recomputed", "full"), ("sampled", None)],
)
def test_flops_of_a_block_match_torch_forward_and_backward(counted, kind, way, checkpointing):
    """The products of the adapter itself, which are not planned, are 2.4 % of a forward pass."""
    run, found = RUNS[kind], counted[f"{kind} {way}"]
    one = run.with_settings(activation_checkpointing=checkpointing or "none")
    two = with_layers(one, 2)
    of_one, of_two = (
        training_flops(each) if checkpointing else each.forward for each in (one, two)
    )
    attention = of_two.attention - of_one.attention
    assert attention == pytest.approx(found["attention"], rel=1e-6)
    products = of_two.products - of_one.products
    assert products == pytest.approx(found["products"], rel=1e-3 if kind == "all" else 0.035)


def test_batched_samples_and_branches_hold_the_sum_of_their_bytes():
    run = RUNS["all"].with_settings(cfg_scale=6.0, mini_batch_size_per_update=2)
    together = run.with_settings(batched_forward=True)
    assert activations.block_bytes(together) == 4 * activations.block_bytes(run)
    assert activations.inference_bytes(together, 3) == 6 * activations.inference_bytes(run, 3)
    assert (
        activations.kept_bytes(together)
        == activations.kept_bytes(run)
        == 4 * activations.kept_bytes(RUNS["all"])
    )


def test_sequence_parallelism_divides_image_tokens_and_heads_but_not_text():
    run = RUNS["all"].with_settings(sp_size=4)
    assert activations.tokens_outside_attention(run) == 21 * 30 * 54 / 4 + BLOCK_TEXT
    assert activations.tokens_inside_attention(run) == (21 * 30 * 54 + BLOCK_TEXT) / 4
