"""Flags of generate.py that save time: SageAttention and compiled blocks, alone and with the flags
they meet.
"""

import functools
import json
import shutil
import sys

import pytest
import torch
from torch._dynamo.utils import counters

import generate
from hyvideo.distributed.parallelize import parallelize
from hyvideo.generation import generator
from hyvideo.models import attention_kernels
from hyvideo.models.attention_kernels import Shape, problem_of
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from tests import tiny_checkpoint
from tests.generation.test_offloading import hunyuan
from tests.rewards.chat_server import completion, endpoints

SMALL = (
    "--prompt one --height 32 --width 48 --video_length 5 --num_inference_steps 2 --device cpu "
    "--guidance_scale 6"
)
# Stands for the package, whose kernels need a GPU: the same function in full precision.
SAGEATTENTION = """
import torch.nn.functional as F
calls = []

def sageattn(q, k, v, tensor_layout="HND", is_causal=False):
    assert tensor_layout == "HND" and not is_causal and q.dtype == k.dtype == v.dtype
    calls.append((q.shape, k.shape, q.dtype))
    return F.scaled_dot_product_attention(q, k, v)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "sageattention.py").write_text(SAGEATTENTION)
    monkeypatch.syspath_prepend(tmp_path / "package")
    yield
    sys.modules.pop("sageattention", None)
    attention_kernels.use("torch")


@pytest.fixture
def without_graphs():
    before = torch._inductor.config.emulate_precision_casts, torch._inductor.config.deterministic
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._inductor.config.emulate_precision_casts, torch._inductor.config.deterministic = before


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """A function that runs generate.py and returns the final latents and the record of the video,
    or the error.
    """
    decode, latents = GRPOPipeline.decode, []
    monkeypatch.setattr(
        GRPOPipeline, "decode", lambda self, x: latents.append(x) or decode(self, x)
    )

    def run(*flags, name="videos"):
        arguments = ["generate.py", *SMALL.split(), *flags, "--output_path", tmp_path / name]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        if generate.main():
            return capsys.readouterr().err
        return latents.pop(), json.loads((tmp_path / name / "0000.json").read_text())

    return run


def original(folder, monkeypatch, head_dim):
    rope = {64: [16, 24, 24], 16: [4, 6, 6]}[head_dim]
    monkeypatch.setitem(tiny_checkpoint.TRANSFORMER, "hidden_size", 2 * head_dim)
    monkeypatch.setitem(tiny_checkpoint.TRANSFORMER, "rope_dim_list", rope)
    return [
        "--model_path",
        tiny_checkpoint.write_original(folder / "ckpts"),
        "--transformer_version",
        "480p_t2v",
    ]


@pytest.mark.slow
def test_sageattention_computes_the_attention_of_the_blocks_and_no_other(
    tmp_path, monkeypatch, package, make
):
    model = original(tmp_path, monkeypatch, 64)
    expected, record = make(*model)
    assert record["use_sageattn"] is record["enable_torch_compile"] is False
    latents, record = make(*model, "--use_sageattn", "--sage_blocks_range", "0-53", name="sage")
    assert record["use_sageattn"] is True and torch.equal(latents, expected)
    from sageattention import calls

    calls = [call for call in calls if call[0][2] < 2048]  # not those of the trial
    # steps, branches of guidance, blocks; the refiner's attention is torch's
    assert len(calls) == 2 * 2 * 2
    image = 2 * 2 * 3
    for query, key, dtype in calls:
        assert query == key and query[:2] == (1, 2) and query[3] == 64 and dtype == torch.bfloat16
        assert image < key[2] < image + 100, (
            "image and valid text tokens, without 1,985 slots for conditions"
        )
    calls.clear()
    latents, _ = make(*model, name="again")
    assert torch.equal(latents, expected) and not calls


def test_sageattention_is_rejected_before_a_model_is_loaded(tmp_path, monkeypatch, make):
    error = make(*original(tmp_path, monkeypatch, 64), "--use_sageattn")
    assert "--use_sageattn" in error and "pip install" in error
    assert not (tmp_path / "videos").exists()


def test_sageattention_must_run_and_has_no_gradient(monkeypatch, package):
    cpu, shape = torch.device("cpu"), Shape(head_dim=64)
    assert problem_of("sage", shape, cpu, with_gradient=True) == "it has no backward pass"
    assert problem_of("sage", shape, cpu, with_gradient=False) is None
    # the trial fails, as for a head dimension without a kernel
    monkeypatch.setattr("sageattention.calls", None)
    assert "AttributeError: 'NoneType'" in problem_of("sage", shape, cpu, with_gradient=False)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param(
            "inductor",
            marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="g++")],
        ),
    ],
)
def test_compiled_blocks_give_the_same_latents_with_lora_cache_and_groups(
    tmp_path, monkeypatch, make, without_graphs, backend
):
    with_backend = functools.partial(parallelize, compile_backend=backend)
    monkeypatch.setattr(generator, "parallelize", with_backend)
    # six blocks, an image, a LoRA
    model = dict(zip(*[iter(map(str, hunyuan(tmp_path, monkeypatch)))] * 2))
    settings = {
        "pretrained_model_root": model.pop("--model_path"),
        "dtype": "fp32",
    }
    # the default on a GPU; rows of unequal length are not compiled in one pass
    settings["batched_forward"] = False
    settings["transformer_version"] = model.pop("--transformer_version")
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    flags = ["--config", tmp_path / "run.yaml", *(word for pair in model.items() for word in pair)]
    schedule = (
        "--enable_cache --total_steps 2 --cache_start_step 0 --cache_end_step 2 "
        "--no_cache_block_id 4 5"
    )
    schedule = schedule.split()
    expected, _ = make(*flags, *schedule)
    latents, record = make(
        *flags, *schedule, "--offloading", "group", "--enable_torch_compile", name="compiled"
    )
    assert record["enable_torch_compile"] is True
    # With inductor, the largest difference was 2.7e-6 of 3.06 (measured).
    tolerance = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(latents, expected, **tolerance)
    assert counters["stats"]["unique_graphs"] == 2  # the last block has an adapter
    assert not counters["graph_break"], "the hooks of group offloading are compiled"


def test_all_flags_are_checked_before_prompts_are_rewritten(tmp_path, monkeypatch, make):
    with endpoints() as start:
        server = start(completion("a cat"))
        rewriting = ["--rewrite", json.dumps({"url": server.url, "model": "a-model"})]
        assert "--total_steps must equal the number of steps" in make(
            *original(tmp_path, monkeypatch, 16), *rewriting, "--enable_cache"
        )
        assert not server.requests
