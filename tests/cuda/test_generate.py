"""generate.py with random weights of the released width: group offloading, step caching and
super-resolution.
"""

import pytest
import torch
import yaml

import generate
from hyvideo.generation.video_sampler import VideoSampler
from tests.conftest import ROOT
from tests.cuda import full_width
from tests.cuda.speed import peak_gib, seconds_of
from tests.cuda.test_pilots import GPU_24GB, limit_memory
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
NUM_LAYERS = 6  # of 54, because drawing weights on the CPU takes long
VERSION, REFINER = "480p_t2v_distilled", "720p_sr_distilled"
FRAMES, HEIGHT, WIDTH = (5, 32, 48) if IS_TINY else (33, 352, 624)
CACHE = ["--enable_cache", "--total_steps", "4", "--cache_start_step", "1", "--cache_end_step", "3"]
# Overlapping copies need a GPU; the cache needs groups of one block.
FLAGS = {
    "on the GPU": ["--offloading", "none"],
    "group offloading": ["--offloading", "group"],
    "group offloading, cache": ["--offloading", "group", *CACHE],
    "super-resolution": [
        "--offloading",
        "none",
        "--sr",
        "--resolution",
        "480p",
        "--cfg_distilled",
    ],
}


@pytest.fixture(scope="module")
def root(gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "checkpoints"
    full_width.write(folder, VERSION, ["a cat"], is_tiny=IS_TINY, num_layers=NUM_LAYERS, sr=REFINER)
    return folder


@pytest.mark.parametrize("way", FLAGS)
def test_generate(root, tmp_path, record, monkeypatch, way):
    """Records seconds and peak memory, with the memory of a GPU with 24 GB.

    No video is written, only decoded.
    """
    monkeypatch.chdir(ROOT)
    limit_memory(GPU_24GB)
    decoded = []

    def decode(sampler, pipeline, latents, video, described=None, *, vae_weights=None):
        decoded.append(latents.cpu())
        (frames,) = pipeline.decode(latents)
        assert frames is not None and len(frames) == settings["sample_n_frames"]

    monkeypatch.setattr(VideoSampler, "write", decode)
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSION,
        "random_weights": True,
        "sample_n_frames": 1 if IS_TINY and "--sr" in FLAGS[way] else FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "device": DEVICE.type,
        "vae_dtype": "fp32" if IS_TINY else "fp16",
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    flags = [
        "--config",
        str(tmp_path / "settings.yaml"),
        "--prompt",
        "a cat",
        "--num_inference_steps",
        "4",
    ]
    flags += ["--output_path", str(tmp_path / "videos"), *FLAGS[way]]
    options = generate.parse(flags)
    try:
        record(
            {
                "peak GiB": peak_gib(
                    lambda: record({"s": seconds_of(lambda: generate.run(options), DEVICE)}), DEVICE
                )
            }
        )
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(decoded) == 1 and decoded[0].isfinite().all()
