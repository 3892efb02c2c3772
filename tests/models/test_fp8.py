"""Frozen matrices in fp8: rounding, gradients, memory, and training of a LoRA on them."""

import hashlib
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hyvideo.data.prompts import read_requests
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.parallelize import parallelize
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.models.fp8 import Fp8Linear, use_fp8
from hyvideo.models.loading import load_transformer, stream_transformer
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.trainer import Trainer
from hyvideo.validation.validation import Validation
from tests.distributed.launch import launch
from tests.models.test_compile import call, gradients, small
from tests.test_trainer import Redness

CPU = torch.device("cpu")
MINIATURE = ("assets/miniature", "miniature")
FP8 = {"base_weight_dtype": "fp8", "lora_rank": 2}


def stored(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.requires_grad_(False)
    layer.__class__ = Fp8Linear
    layer.store(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_rounded_to_fp8_with_the_scale_of_its_row(dtype):
    weight = (torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]).to(dtype)
    # 448: the largest number in float8_e4m3fn
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).float()
    expected = (
        (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    ).to(dtype)
    layer = stored(weight)
    assert torch.equal(layer.weight.dequantize(), expected) and layer.weight.dtype == dtype
    error = (layer.weight.dequantize().float() - weight.float()).norm(dim=1) / weight.float().norm(
        dim=1
    )
    assert 0.01 < error.min() and error.max() < 2**-4  # half the spacing of numbers with three bits


def test_a_row_of_zeros_stays_zero_and_changes_no_other_row():
    """A pruned or zero-initialized row has the scale 0, which must not become 0 / 0."""
    weight = torch.randn(4, 64)
    layer, tokens = stored(weight), torch.randn(2, 64)
    weight[2] = 0
    with_zeros = stored(weight)
    outputs = with_zeros(tokens)
    assert torch.equal(outputs[:, 2], torch.zeros(2))
    others = [0, 1, 3]
    assert torch.equal(outputs[:, others], layer(tokens)[:, others])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_are_those_of_the_rounded_weight(dtype, autocast):
    layer = stored(torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype))
    tokens = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = layer(tokens)
        expected = nn.functional.linear(tokens, layer.weight.dequantize(), layer.bias)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    upstream = torch.randn_like(found)
    assert torch.equal(
        *(torch.autograd.grad(output, tokens, upstream)[0] for output in (found, expected))
    )


def test_the_backward_pass_keeps_only_the_fp8_weight():
    layer, saved = stored(torch.randn(48, 64)), []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 64, requires_grad=True))
    assert [type(tensor).__name__ for tensor in saved] == ["Float8Tensor"]
    assert saved[0].qdata.data_ptr() == layer.weight.qdata.data_ptr()


def test_each_matrix_is_quantized_as_it_is_read_and_the_other_layers_are_kept():
    transformer, weights = stream_transformer(*MINIATURE)
    names = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    use_fp8(transformer)
    layers = {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, Fp8Linear)
    }

    def watched():
        for name, weight in weights:
            layer = layers.get(name.removesuffix(".weight"))
            assert layer is None or layer.weight is None, f"{name} was allocated before it was read"
            yield name, weight

    fill_shards(transformer, watched(), device=CPU)
    expected = load_transformer(*MINIATURE).state_dict()
    for name, tensor in transformer.state_dict().items():
        if name.removesuffix(".weight") in layers:
            assert torch.equal(tensor.dequantize(), stored(expected[name]).weight.dequantize()), (
                name
            )
        else:
            assert torch.equal(tensor, expected[name]), name
    rest = sorted(name for name in names - layers.keys() if name.startswith("transformer_blocks"))
    assert rest and all(".norm" in name for name in rest)  # modulation


def with_lora():
    """Return a small transformer with fp8 matrices and a LoRA that changes the output."""
    model = small()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_fp8(model.to("meta"))
    add_trainable_lora(model, training_config(model, rank=2, alpha=2.0))
    fill_shards(model, iter(weights.items()), device=CPU)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


@pytest.mark.parametrize(
    "recompute, compile",
    [
        ("full", False),
        ("selective", False),
        pytest.param("full", True, marks=pytest.mark.slow),  # half a minute of tracing
        pytest.param("none", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_and_recomputed_blocks_compute_the_same(mesh, monkeypatch, recompute, compile):
    """Shapes are static here, which traces much faster; test_compile.py covers dynamic shapes."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *parts, **options: compiled(*parts, **options | {"dynamic": False})
    )
    model, plain = with_lora(), with_lora()
    parallelize(model, mesh, recompute=recompute, compile=compile, compile_backend="aot_eager")
    rollout, update, expected = call(model, 7), call(model, 7, grad=True), call(plain, 7)
    assert torch.equal(rollout, update)
    torch.testing.assert_close(update, expected)
    found, expected = gradients(model, (7,)), gradients(plain, (7,))
    assert found.keys() == expected.keys() and all(".lora_" in name for name in found)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.system
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_ratios_of_fresh_rollouts_are_exactly_1_and_the_base_never_changes(
    tiny_config, mesh, dtype
):
    settings = {
        "kl_strategy": "dual_moving",
        "update_ref_model_step": 1,
        "ema_decay": 0.9,
        "learning_rate": 1e-2,
    }
    config = tiny_config.with_settings(
        **FP8, **settings, dtype=dtype, activation_checkpointing="full"
    )
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    base = {
        name: weight
        for name, weight in trainer.run.policy.transformer.named_parameters()
        if not weight.requires_grad
    }
    before = {
        name: (w.dequantize() if hasattr(w, "qdata") else w).clone() for name, w in base.items()
    }
    assert any(hasattr(weight, "qdata") for weight in base.values())
    validated = config.with_settings(valid_video_csv=config.data.prompts_csv)
    validation = Validation(
        validated,
        mesh,
        trainer.run.pipeline,
        trainer.run.encoder,
        trainer.run.scorer,
        read_requests(*validated.data.valid_video_csv),
    )
    assert validation.made_with["base_weight_dtype"] == "fp8"
    for _ in range(2):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        assert metrics["policy/ratio_max_deviation"] == metrics["policy/ratio_first_deviation"] == 0
        assert math.isfinite(metrics["grad/norm"]) and metrics["grad/norm"] > 0
    for name, weight in base.items():
        assert torch.equal(
            weight.dequantize() if hasattr(weight, "qdata") else weight, before[name]
        ), name


def digests(transformer):
    """Return a hash of the values of each tensor, dequantized, by name."""
    values = {
        name: (w.dequantize() if hasattr(w, "qdata") else w)
        for name, w in transformer.state_dict().items()
    }
    return {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in values.items()
    }


def filled(read):
    transformer, weights = stream_transformer(*MINIATURE, read=read)
    use_fp8(transformer)
    fill_shards(transformer, weights, device=CPU)
    return digests(transformer)


def fill_on_ranks():
    return filled(read=ranks.start(1, CPU, timeout=60).is_main)


def test_every_rank_has_the_values_of_a_single_process():
    """Each part of a weight is received, also its scale: only the first rank reads the files."""
    expected = filled(read=True)
    assert len(expected) > 100
    for rank, found in enumerate(launch("tests.models.test_fp8:fill_on_ranks", 2)):
        assert [name for name in expected if found[name] != expected[name]] == [], f"rank {rank}"
