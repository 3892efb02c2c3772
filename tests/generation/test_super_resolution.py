"""Super-resolution in generate.py: a small checkpoint end to end, its sizes, its record and its
errors.
"""

import json
import shutil
import sys

import pytest
import torch

import generate
from hyvideo.data import images
from hyvideo.data.images import bucket_sizes, larger_size, nearest_size
from hyvideo.data.randomness import normal
from hyvideo.generation import video_sampler
from hyvideo.generation.super_resolution import LowResolution, Refiner, load_upsampler
from hyvideo.generation.video_sampler import STAGE, VideoSampler
from hyvideo.models.family import family_named
from hyvideo.models.hunyuan_video15.prompt_encoders import ImageEncoder
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.schedulers.transitions import shifted_levels
from tests.live_tensors import LiveTensors
from tests.models.conftest import GOLDEN
from tests.tiny_checkpoint import write_image, write_original, write_super_resolution

TINY = {"480p": 64, "720p": 96, "1080p": 144}  # sides of a square, in pixels
SMALL = "--height 48 --width 80 --video_length 5 --num_inference_steps 2 --device cpu --dtype fp32 --seed 3".split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_original(tmp_path_factory.mktemp("tiny") / "ckpts", ("480p_t2v", "480p_i2v"))
    return write_super_resolution(write_super_resolution(root), "1080p_sr_distilled")


@pytest.fixture
def run(root, tmp_path, monkeypatch, capsys):
    """A function that runs generate.py with small buckets and returns exit code, stderr and the
    written frames.
    """
    for name, side in TINY.items():
        monkeypatch.setitem(images.RESOLUTIONS, name, side)
    write = video_sampler.write_video

    def run(*flags, out="out", model=root):
        written = {}
        monkeypatch.setattr(
            video_sampler,
            "write_video",
            lambda path, video, fps: [written.update({path.name: video}), write(path, video, fps)],
        )
        where = [
            "--model_path",
            model,
            "--transformer_version",
            "480p_t2v",
            "--output_path",
            tmp_path / out,
        ]
        monkeypatch.setattr(
            sys, "argv", ["generate.py", *map(str, [*where, "--prompt", "a cat", *SMALL, *flags])]
        )
        return generate.main(), capsys.readouterr().err, written

    return run


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolutions", ["480p->720p", "720p->1080p"])
def test_the_larger_size_of_every_bucket_is_the_originals(resolutions):
    rows = json.loads((GOLDEN / "super_resolution.json").read_text())["buckets"][resolutions]
    base, larger = resolutions.split("->")
    assert sorted((height, width) for height, width, *_ in rows) == sorted(bucket_sizes(base))
    assert [list(larger_size(height, width, larger)) for height, width, *_ in rows] == [
        row[2:] for row in rows
    ]


# --- generate.py -------------------------------------------------------------------------------


@pytest.mark.slow
def test_conditions_and_latents_in_memory_do_not_grow_with_the_number_of_videos(
    run, tmp_path, monkeypatch
):
    encode, sample = ConditionEncoder.__call__, VideoSampler.sample
    most = {}
    for count in (1, 4):
        conditions, latents = LiveTensors(), LiveTensors()

        def encoded(self, requests, *size, conditions=conditions):
            found = encode(self, requests, *size)
            conditions.add(sample.text for sample in found.samples)
            return found

        def sampled(self, *arguments, latents=latents, **options):
            final = sample(self, *arguments, **options)
            latents.add([final])
            return final

        monkeypatch.setattr(ConditionEncoder, "__call__", encoded)
        monkeypatch.setattr(VideoSampler, "sample", sampled)
        prompts = [f"cat {number}" for number in range(count)]
        code, error, _ = run("--sr", "--prompt", *prompts, out=f"out{count}")
        assert code == 0, error
        most[count] = (conditions.most, latents.most)
        left = {path.suffix for path in (tmp_path / f"out{count}").iterdir()}
        assert left <= {".mp4", ".json", ".html"}  # no folder of conditions
    # One more of each, because a loop's variable keeps the last one while the next is made.
    assert most[4] <= tuple(number + 1 for number in most[1])


@pytest.mark.system
def test_a_video_is_refined_and_both_are_written(run, tmp_path):
    code, error, both = run("--sr", "--save_pre_sr_video")
    assert code == 0, error
    base = run(out="base")[2]
    again = run("--sr", "true", "--offloading", "group", out="again")[2]
    assert both["0000.mp4"].shape == (5, 3, 64, 112) and both["0000_before_sr.mp4"].shape == (
        5,
        3,
        48,
        80,
    )
    assert torch.equal(both["0000_before_sr.mp4"], base["0000.mp4"])
    assert torch.equal(both["0000.mp4"], again["0000.mp4"]) and list(again) == ["0000.mp4"]
    record, plain = (
        json.loads((tmp_path / out / "0000.json").read_text()) for out in ("out", "base")
    )
    assert (record["height"], record["width"]) == (48, 80) and plain["super_resolution"] is None
    expected = {
        "version": "720p_sr_distilled",
        "steps": 6,
        "shift": 2.0,
        "height": 64,
        "width": 112,
    }
    assert record["super_resolution"] == expected


@pytest.mark.system
def test_a_repeated_command_uses_the_latents_of_the_base_model(run, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Refiner, "load", killed)
        with pytest.raises(KeyboardInterrupt):
            run("--sr")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".0000.base.safetensors"]
    stages, sample = [], VideoSampler.sample

    def counted(*given, **options):
        stages.append(given[5:])
        return sample(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(VideoSampler, "sample", counted)
        code, error, again = run("--sr")
    assert code == 0 and stages == [(STAGE,)], error
    assert torch.equal(again["0000.mp4"], run("--sr", out="whole")[2]["0000.mp4"])
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_an_image_is_encoded_at_both_sizes_and_a_lora_is_the_base_models(
    run, root, tmp_path, monkeypatch
):
    samples, levels, scales, low_resolutions, images_at = [], [], [], [], {}
    sample, encode = GRPOPipeline.sample_ode, ImageEncoder.__call__
    channels = LowResolution.channels

    def added(self, timestep):
        low_resolutions.append(self.latents)
        return channels(self, timestep)

    monkeypatch.setattr(LowResolution, "channels", added)

    def sampled(self, conditions, noise, schedule):
        levels.append(schedule.sigmas)
        scales.append(self.sampling.guidance.scale)
        samples.append(
            (self, *conditions.samples, noise, sample(self, conditions, noise, schedule))
        )
        return samples[-1][-1]

    def encoded(self, path, *size):
        images_at[size] = encode(self, path, *size)
        return images_at[size]

    monkeypatch.setattr(GRPOPipeline, "sample_ode", sampled)
    monkeypatch.setattr(ImageEncoder, "__call__", encoded)
    save_lora(
        {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(1, 32), torch.ones(32, 1), 8.0)},
        tmp_path / "lora",
    )
    image = write_image(tmp_path / "image.png", height=110, width=80)
    flags = [
        "--transformer_version",
        "480p_i2v",
        "--image_path",
        image,
        "--lora_path",
        tmp_path / "lora",
    ]
    flags += "--initial_noise reference --guidance_scale 3 --height 64 --width 64".split()
    code, error, _ = run("--sr", *flags)
    assert code == 0, error
    (_, base, _, final), (pipeline, refined, noise, _) = samples
    assert torch.equal(base.text, refined.text)
    nearest = nearest_size(110, 80, bucket_sizes("720p"))
    assert list(images_at) == [(64, 64), (96, 96), nearest] and nearest != (96, 96)
    assert torch.equal(refined.image.latents, images_at[96, 96].latents)
    assert torch.equal(refined.image.embeds, images_at[nearest].embeds)
    family = family_named("hunyuan_video15")
    upsampler = load_upsampler(root, "720p_sr_distilled", family, device=torch.device("cpu"))
    added = normal((4, 2, 6, 6), 3, "generate", 0, STAGE, "augmentation")[None]
    with torch.no_grad():
        assert torch.equal(low_resolutions[-1], upsampler.condition(final, added))
    expected = torch.randn(
        1, 4, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.bfloat16
    )
    assert torch.equal(noise, expected.float()), "the original's noise for the seed"
    assert pipeline.transformer.config.in_channels == 14 and not hasattr(
        pipeline.transformer, "peft_config"
    )
    assert pipeline.transformer.is_flow_map
    assert levels[1] == shifted_levels(len(levels[1]) - 1, 2.0) != levels[0]
    assert scales == [3.0, 1.0]


def test_what_cannot_be_refined_is_rejected(run, tmp_path):
    code, error, written = run("--sr", "--height", "48", "--width", "96")
    assert code == 2 and "48 x 96" in error and not written and not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_reported_with_the_download_command(run, root, tmp_path):
    model = shutil.copytree(root, tmp_path / "ckpts")
    file = model / "transformer/720p_sr_distilled/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, error, _ = run("--sr", model=model)
    assert (
        code == 2 and "transformer/720p_sr_distilled" in error and not (tmp_path / "out").exists()
    )
    assert "download_weights.sh --version 720p_sr_distilled" in error
