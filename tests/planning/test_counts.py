"""The table of FLOPs and parameters equals what is counted, and plans need no torch."""

import subprocess

import pytest

from hyvideo.models.sizes import read_architecture
from hyvideo.planning import counting, flops
from tests.forked import LIGHT, ROOT, python
from tests.shallow import SHALLOW

MODELS = counting.listed_models()
QUICK = ("480p_i2v_step_distilled", "wan2.2_ti2v_5b", "miniature")


def by_key(key):
    return {key(sizes): name for name, (sizes, _) in reversed(MODELS.items())}.values()


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in by_key(flops.forward_key)
    ],
)
@pytest.mark.parametrize("tokens, text", [((5, 6, 10), 77)])
def test_the_table_has_the_counted_flops_of_other_sizes(name, tokens, text):
    sizes, _ = MODELS[name]
    grid = tuple(side * patch for side, patch in zip(tokens, sizes.patch))
    assert flops.forward_key(sizes) in flops._table()["forward"]
    assert flops.flops_of_latents(sizes, grid, text) == counting.flops_of_latents(sizes, grid, text)


def test_the_table_has_the_flops_of_a_model_with_another_number_of_blocks():
    sizes = read_architecture(str(ROOT / SHALLOW), "miniature")
    listed, _ = MODELS["miniature"]
    assert sizes.num_layers != listed.num_layers
    assert flops.forward_key(sizes) == flops.forward_key(listed)
    found = flops.flops_of_latents(sizes, (3, 4, 6), 7)
    assert found == counting.flops_of_latents(sizes, (3, 4, 6), 7)
    assert found != flops.flops_of_latents(listed, (3, 4, 6), 7)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_the_table_has_the_counted_parameters(name):
    sizes, targets = MODELS[name]
    assert flops.parameters_key(sizes, targets) in flops._table()["parameters"]
    assert flops.count_parameters(sizes, targets) == counting.count_parameters(sizes, targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", by_key(flops.decoding_key))
def test_the_table_has_the_counted_decoding(name):
    sizes, _ = MODELS[name]
    assert flops.count_decoding(sizes) == counting.count_decoding(sizes)


# Ends the program, with the lines that it has printed, where it imports torch.
PROGRAM = """
import os, sys

class End:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, End())
sys.argv = ["post_train.py", *sys.argv[1:], "--print_config"]
import post_train
post_train.main()
"""


@pytest.mark.parametrize(
    "words, last",
    [
        (["--config", "configs/miniature.yaml", "--sample_n_frames", "17"], "step  sigma"),
        (["--config", "configs/wan21_1gpu_nft.yaml", "--gpu", "RTX 4090"], "whole run"),
    ],
    ids=["miniature", "of a card"],
)
def test_a_plan_is_printed_before_torch_is_imported(words, last):
    command = [python(LIGHT), "-c", PROGRAM, *words]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    assert "updates per iteration" in printed and last in printed
