"""The policy: gathering the adapter, and starting from a LoRA."""

from dataclasses import replace

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.loading.model_setup import check_adapter
from hyvideo.models.loading import load_transformer, transformer_on_meta
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.training.policy import Policy

CPU = torch.device("cpu")


# --- starting from a LoRA -------------------------------------------------------------------------

MINIATURE = ("assets/miniature", "miniature")
TARGETS = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.ff.net.2",
    "transformer_blocks.0.attn.add_k_proj",
)
REQUESTS = [Request("a red circle moves up")]


def draw(targets=TARGETS, rank=2, alpha=4.0):
    transformer, generator = transformer_on_meta(*MINIATURE), torch.Generator().manual_seed(0)
    lora = {}
    for name in targets:
        out, into = transformer.get_submodule(name).weight.shape
        a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, into), (out, rank)))
        lora[name] = LoraPair(a, 0.1 * b, alpha)
    return lora


def test_a_fresh_adapter_has_the_variance_of_peft_and_no_effect(tiny_config, mesh):
    """A is uniform in peft, by kaiming_uniform with a = sqrt(5), which has the variance 1 / (3
    inputs) at any rank.
    """
    policy = Policy(tiny_config.with_settings(lora_rank=2), mesh, CPU, REQUESTS)
    by_width = {}
    for pair in policy.lora().values():
        assert not pair.b.any()
        by_width.setdefault(pair.a.shape[1], []).append(pair.a.flatten())
    assert len(by_width) > 1
    for width, factors in by_width.items():
        drawn = torch.cat(factors)
        assert len(drawn) > 1000
        assert drawn.std().item() == pytest.approx((3 * width) ** -0.5, rel=0.1)
        assert drawn.mean().abs() < 0.1 * drawn.std()


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name].a, second[name].a) and torch.equal(first[name].b, second[name].b)
        for name in first
    )


# ComfyUI's form has one matrix for query, key and value (test_lora.py)
@pytest.mark.parametrize("form", ["diffusers", "peft", "original"])
def test_a_lora_file_is_the_initial_adapter_and_anchor(tiny_config, mesh, tmp_path, form):
    lora = draw()
    if form == "original":  # alpha is in B
        lora = {name: replace(pair, alpha=2.0) for name, pair in lora.items()}
    save_lora(lora, tmp_path / "lora", form=form)
    path = (
        tmp_path / "lora" if form == "original" else next((tmp_path / "lora").glob("*.safetensors"))
    )
    config = tiny_config.with_settings(
        lora_rank=2,
        lora_alpha=2.0 if form == "original" else 4.0,
        pretrained_lora_path=str(path),
        kl_strategy="fixed",
    )
    check_adapter(config.model, config.optimizer)
    policy = Policy(config, mesh, CPU, REQUESTS)
    assert same(policy.lora(), lora) and len(policy.trained) == 2 * len(lora)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(1)
    with policy.anchor.swapped_in():
        assert same(policy.lora(), lora)
    assert not same(policy.lora(), lora)


def test_in_full_training_a_lora_file_is_merged_into_the_weights(tiny_config, mesh, tmp_path):
    lora = draw()
    save_lora(lora, tmp_path)
    config = tiny_config.with_settings(
        pretrained_model_root=MINIATURE[0], pretrained_lora_path=str(tmp_path), random_weights=False
    )
    policy = Policy(config, mesh, CPU, REQUESTS)
    expected = load_transformer(*MINIATURE).state_dict()
    for name, pair in lora.items():
        expected[f"{name}.weight"] += 2 * pair.b @ pair.a  # alpha / rank
    for name, tensor in policy.transformer.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lora_rank": 8, "lora_alpha": 4.0}, "got 8 and 4, need 2 and 4"),
        (
            {"pretrained_lora_path": "", "lora_rank": 2, "lora_target_modules": ["atn.to_q"]},
            "matches 'atn.to_q'",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected_before_weights_are_read(
    tiny_config, tmp_path, settings, message
):
    save_lora(draw(), tmp_path / "lora")
    config = tiny_config.with_settings(
        **{"pretrained_lora_path": str(tmp_path / "lora")} | settings
    )
    with pytest.raises(ValueError, match=message):
        check_adapter(config.model, config.optimizer)


def test_a_lora_of_another_model_is_rejected_before_weights_are_read(tiny_config, tmp_path):
    save_lora({TARGETS[1]: LoraPair(torch.ones(2, 3), torch.ones(3, 2), 4.0)}, tmp_path)
    config = tiny_config.with_settings(pretrained_lora_path=str(tmp_path))
    with pytest.raises(ValueError, match="blocks.1.ff.net.2 has shape"):
        check_adapter(config.model, config.optimizer)
