"""Tests of the miniature build: repeatable and loadable; and of the shipped miniatures: small and
complete.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.miniature_from_scratch import __main__ as build
from examples.miniature_from_scratch import first_frame
from examples.miniature_from_scratch.architecture import DRAWN_PARTS, VERSION
from examples.miniature_from_scratch.reward_model import train as train_reward_model
from hyvideo.data.prompts import Request, read_requests
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.miniature import world
from hyvideo.miniature.reward import REFERENCE_STATISTICS
from hyvideo.models.loading import load_transformer
from hyvideo.models.wan.encoders import TextEncoder, load_text_encoder

SHIPPED = Path("assets/miniature")
REQUESTS = [Request("a red circle moves up"), Request('a sign that says "HELLO"')]
SHIPPED_WAN = Path("assets/miniature_wan")
SHIPPED_TI2V = Path("assets/miniature_wan_ti2v")
WEIGHTS = {
    "hunyuan_video15": ("transformer/miniature", "vae"),
    "wan": ("transformer", "vae", "text_encoder"),
}


@pytest.fixture
def small_build(monkeypatch):
    def run(out, family):
        monkeypatch.setattr("sys.argv", ["build", "--family", family, "--output_dir", str(out)])
        sizes = {
            "VAE_STEPS": 2,
            "BASE_STEPS": 2,
            "REWARD_STEPS": 2,
            "WEB_CLIPS": 48,
            "REWARD_CLIPS": 8,
        }
        for name, size in (sizes | {"REFERENCE_CLIPS": 1}).items():
            monkeypatch.setattr(build, name, size)
        train = partial(train_reward_model, batch_size=8)
        monkeypatch.setattr(
            build,
            "train_reward_model",
            lambda *clips, batch_size, **options: train(*clips, **options),
        )
        build.main()
        return [load_file(next((out / part).glob("*.safetensors"))) for part in WEIGHTS[family]]

    return run


@pytest.mark.slow
def test_a_build_is_bit_for_bit_repeatable(small_build, tmp_path):
    first, second = (small_build(tmp_path / name, "hunyuan_video15") for name in "ab")
    for a, b in zip(first, second):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    models = [
        torch.load(tmp_path / name / "VideoReward/checkpoint-1/model.pth", weights_only=True)
        for name in "ab"
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_a_wan_build_is_a_pipeline_and_bit_for_bit_repeatable(small_build, tmp_path):
    from diffusers import WanPipeline

    first, second = (small_build(tmp_path / name, "wan") for name in "ab")
    assert check_checkpoint(tmp_path / "a", "miniature_wan", REQUESTS) == []
    for a, b in zip(first, second):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "a" / REFERENCE_STATISTICS).is_file()
    pipeline = WanPipeline.from_pretrained(tmp_path / "a", torch_dtype=torch.float32)
    states, _ = pipeline.encode_prompt(
        world.CAPTIONS[0], do_classifier_free_guidance=False, max_sequence_length=512
    )
    (ours,) = TextEncoder(*load_text_encoder(tmp_path / "a"))(world.CAPTIONS[:1])
    torch.testing.assert_close(states[0, : len(ours)], ours)
    assert not states[0, len(ours) :].any()


def test_the_shipped_checkpoint_is_small_and_valid():
    files = [path for path in SHIPPED.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 8 * 2**20
    assert check_checkpoint(SHIPPED, VERSION, REQUESTS) == []


def test_parts_that_are_not_saved_are_redrawn():
    stored = load_file(SHIPPED / "transformer" / VERSION / "diffusion_pytorch_model.safetensors")
    assert not any(name.startswith(DRAWN_PARTS) for name in stored)
    transformer = load_transformer(SHIPPED, VERSION)
    assert transformer.context_embedder_2.linear_1.weight.std() > 0


def test_the_shipped_wan_miniature_is_small_and_valid():
    assert sum(path.stat().st_size for path in SHIPPED_WAN.rglob("*") if path.is_file()) < 3.5e6
    assert check_checkpoint(SHIPPED_WAN, "miniature_wan", REQUESTS) == []


@pytest.mark.slow
def test_the_build_with_first_frames_is_complete_and_repeatable(tmp_path, monkeypatch):
    for name, size in {"STEPS": 2, "WEB_CLIPS": 48, "REFERENCE_CLIPS": 1}.items():
        monkeypatch.setattr(first_frame, name, size)
    for name in "ab":
        monkeypatch.setattr("sys.argv", ["build", "--output_dir", str(tmp_path / name)])
        first_frame.main()
    requests = read_requests(tmp_path / "a" / "prompts" / "train.csv")
    assert check_checkpoint(tmp_path / "a", "miniature_wan_ti2v", requests) == []
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*")]
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )


def test_the_shipped_miniature_with_first_frames_is_small_and_has_a_frame_for_every_prompt():
    files = [path for path in SHIPPED_TI2V.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3.5e6
    for name, number in (("train", 36), ("valid", 48)):
        requests = read_requests(SHIPPED_TI2V / "prompts" / f"{name}.csv")
        assert check_checkpoint(SHIPPED_TI2V, "miniature_wan_ti2v", requests) == []
        assert len(requests) == number
        for request in requests:
            _, color, shape, *_ = request.prompt.split()
            assert Path(request.image).name == f"{color}_{shape}.png"
