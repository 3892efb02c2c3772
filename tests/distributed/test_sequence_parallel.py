"""Tests of Ulysses sequence parallelism on gloo processes against one process: outputs and
gradients.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hyvideo.distributed.sequence_parallel import head_shares
from hyvideo.generation.step_cache import step_cache
from hyvideo.generation.step_caching import StepCaching
from hyvideo.models.conditions import Condition, ImageCondition
from tests.distributed.launch import launch
from tests.forked import built_once

MODULE = "tests.distributed.test_sequence_parallel"

# (frames, height, width) of the latents, and (text, glyph, image) tokens of each sample in the
# batch.
CASES = {
    "even": ((2, 4, 4), [(5, 0, 0)]),
    "even, quoted": ((2, 4, 4), [(5, 3, 2)]),
    "odd tokens": ((3, 5, 7), [(7, 3, 0)]),
    "fewer tokens than ranks": ((1, 1, 3), [(4, 0, 0)]),
    "unequal texts": ((2, 3, 3), [(2, 0, 0), (9, 4, 0), (3, 0, 5)]),
}


@built_once
def tiny_transformer(num_heads=4, num_layers=3):
    """Return a small transformer of the real class with nonzero random weights."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(0)
    model = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=num_heads,
        attention_head_dim=16,
        num_layers=num_layers,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=12,
        text_embed_2_dim=10,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        target_size=32,
        task_type="t2v",
    )
    for name, parameter in model.named_parameters():
        scale = 0.05 if parameter.ndim > 1 else 0.1
        nn.init.normal_(
            parameter, mean=1.0 if "norm" in name and parameter.ndim == 1 else 0.0, std=scale
        )
    return model.eval()


def inputs(case):
    size, texts = CASES[case]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    latents, image_latents, _ = draw(len(texts), 9, *size).split((4, 4, 1), dim=1)
    conditions = [Condition(draw(text, 12)) for text, _, _ in texts]
    glyphs = [draw(glyph, 10) if glyph else None for _, glyph, _ in texts]
    images = [draw(image, 8) if image else None for _, _, image in texts]
    for row, (glyph, image) in enumerate(zip(glyphs, images)):
        picture = None if image is None else ImageCondition(image, image_latents[row, :, 0])
        conditions[row] = replace(conditions[row], glyph=glyph, image=picture)
    timestep = torch.tensor([990.3, 412.7, 55.1][: len(texts)])
    return {"latents": latents, "timestep": timestep, "conditions": conditions}


def output_and_gradients(model, case):
    """Return the output and the gradients of a loss that mixes all tokens."""
    model.zero_grad()
    out = model(**inputs(case))
    weights = torch.linspace(-1, 1, out[0].numel()).view_as(out[0])
    ((out * weights).sum() + (out**2).mean().sqrt()).backward()
    return out.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@torch.no_grad()
def cached_output(model):
    """Return the output of a cached step, extrapolated from two full steps with odd numbers of
    tokens.
    """
    caching = StepCaching("taylorcache", total_steps=5, cache_start_step=2, cache_end_step=5)
    with step_cache(model, caching):
        for scale in (1.0, 1.1, 1.2, 1.3):
            arguments = inputs("odd tokens")
            out = model(**arguments | {"timestep": arguments["timestep"] / scale})
    return out


def compare(num_processes, is_quick=False):
    """Return the largest deviation of the output and the largest relative deviation of averaged
    gradients; quickly, only of texts of unequal length.
    """
    import torch.distributed as dist

    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize
    from hyvideo.models.family import freeze_unused_parameters, install

    mesh = ranks.start(num_processes, torch.device("cpu"))
    found = {}
    cases = ["unequal texts"] if is_quick else [*CASES]
    for heads in (4,) if is_quick else (4, 5):
        plain = tiny_transformer(heads, num_layers=2)
        install(plain)
        freeze_unused_parameters(plain)
        single = {case: output_and_gradients(plain, case) for case in cases}
        for recompute in ("none",) if is_quick else ("none", "full", "selective"):
            if heads == 5 and recompute != "none":
                continue
            split = tiny_transformer(heads, num_layers=2)
            install(split)
            freeze_unused_parameters(split)
            parallelize(split, mesh, recompute=recompute)
            if recompute == "none":
                cached = [cached_output(model) for model in (split, plain)]
                found[f"{heads} heads, cached step"] = (
                    (cached[0] - cached[1]).abs().max().item(),
                    0.0,
                )
            for case in cases if recompute == "none" else ("unequal texts",):
                expected, gradients = single[case]
                out, local = output_and_gradients(split, case)
                assert local.keys() == gradients.keys()
                flat = torch.cat([gradient.flatten() for gradient in local.values()])
                dist.all_reduce(flat)
                averaged = (flat / num_processes).split(
                    [gradient.numel() for gradient in local.values()]
                )
                worst = 0.0
                for name, gradient in zip(local, averaged):
                    gradient = gradient.view_as(local[name])
                    scale = gradients[name].abs().max()
                    if scale > 1e-5:  # key biases have no gradient: softmax is invariant to them
                        worst = max(
                            worst, ((gradient - gradients[name]).abs().max() / scale).item()
                        )
                found[f"{heads} heads, {recompute}, {case}"] = (
                    (out - expected).abs().max().item(),
                    worst,
                )
    return found


@pytest.mark.system
def test_output_and_gradients_equal_those_of_one_process():
    results = launch(f"{MODULE}:compare", 4, 4)
    for found in results:
        # both numbers of heads, and two kinds of checkpointing
        assert len(found) == 2 * (len(CASES) + 1) + 2
        for case, (output, gradient) in found.items():
            assert output <= 2e-6 and gradient <= 5e-6, (case, output, gradient)


def test_gradients_of_texts_of_unequal_length_equal_those_of_one_process():
    for found in launch(f"{MODULE}:compare", 2, 2, True):
        output, gradient = found["4 heads, none, unequal texts"]
        assert output <= 2e-6 and gradient <= 5e-6


def train_quoted_and_plain():
    """Return the gradients that differ from one process if only rank 0 has quoted text and an
    image.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.parallelize import parallelize
    from hyvideo.distributed.sharded_tensors import full_tensor
    from hyvideo.models.family import freeze_unused_parameters, install

    mesh = ranks.start(1, torch.device("cpu"), timeout=60)
    plain, sharded = tiny_transformer(), tiny_transformer()
    for model in (plain, sharded):
        install(model)
        freeze_unused_parameters(model)
    for case in ("even, quoted", "even"):
        plain(**inputs(case)).square().mean().div(2).backward()
    parallelize(sharded, mesh, shard=True)
    sharded(**inputs(("even, quoted", "even")[mesh.rank])).square().mean().backward()
    return [
        name
        for (name, expected), found in zip(plain.named_parameters(), sharded.parameters())
        if expected.grad is not None
        and not torch.allclose(full_tensor(found.grad), expected.grad, rtol=1e-4, atol=1e-6)
    ]


@pytest.mark.system
def test_ranks_with_and_without_quotes_and_images_reduce_the_same_gradients():
    assert launch(f"{MODULE}:train_quoted_and_plain", 2) == [[], []]


def test_heads_are_divided_as_evenly_as_possible():
    assert head_shares(16, 8) == [2] * 8
    assert head_shares(3, 2) == [2, 1]
    assert head_shares(16, 3) == [6, 5, 5]


def test_more_ranks_than_heads_raise_an_error_before_a_model_is_loaded():
    from hyvideo.loading.model_setup import check_checkpoint
    from hyvideo.settings.command_line import load_config

    config = load_config("configs/smoke.yaml", sp_size=4)
    with pytest.raises(
        ValueError,
        match="at most the 3 attention heads of the transformer, got 4; 1, 3 give every rank",
    ):
        check_checkpoint(config, {}, [(5, 16, 16)])
