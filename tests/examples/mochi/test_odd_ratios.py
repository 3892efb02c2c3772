"""A family outside the repository with a temporal ratio of 6, a spatial ratio of 12 and 12 latent
channels, through every program: a number of a built-in family in the shared code fails here.
"""

import json
import sys

import pytest
import torch

import generate
import post_train
from hyvideo.checks.rules import check
from hyvideo.data.videos import read_video
from hyvideo.distributed.tiles import Tiles
from hyvideo.models.decoding import Tiling, decode, set_tiling
from hyvideo.models.loading import load_vae
from hyvideo.models.sizes import read_architecture
from hyvideo.records.metrics_file import read_metrics
from hyvideo.trainer import Trainer
from scripts import export
from tests.examples.mochi.tiny import FOLDER, PROMPTS, write_mochi
from tests.registered import registered
from tests.test_trainer import CPU, Redness

SIZE = (7, 24, 48)  # frames, height and width: 2 x 2 x 4 latents
TILE = 30  # pixels, of which 24 are whole latents


@pytest.fixture(scope="module", autouse=True)
def family():
    with registered(FOLDER):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_mochi(tmp_path_factory.mktemp("odd"), odd=True)


@pytest.fixture
def config(tiny_config, root, tmp_path):
    csv = tmp_path / "prompts.csv"
    csv.write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    frames, height, width = SIZE
    return tiny_config.with_settings(
        family=FOLDER,
        pretrained_model_root=str(root),
        transformer_version="of_my_own",  # not listed: the family is that of config.json
        random_weights=False,
        encoder_dtype="fp32",
        prompts_csv=str(csv),
        valid_video_csv=str(csv),
        validation_interval=2,
        validation_steps=2,
        sample_n_frames=frames,
        height=height,
        width=width,
        vae_tile_size=0,
        batch_size=2,
        num_generations=2,
        mini_batch_size_per_update=2,
        grpo_sampling_steps=2,
        cfg_scale=2.0,
        reward_model=["test"],
        num_threads=1,
        max_steps=2,
        save_interval=1,
        learning_rate=1e-3,
    )


def trained(config, mesh):
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    return trainer


@pytest.mark.system
def test_a_run_trains_and_a_stopped_one_resumes_bit_for_bit(config, mesh, tmp_path):
    config = config.with_settings(lora_rank=2)
    uninterrupted = trained(config, mesh)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["grad/norm"] > 0 for line in lines)
    assert lines[0]["policy/ratio_first_deviation"] == 0
    videos = sorted((tmp_path / "run" / "samples" / "000002").glob("*.mp4"))
    assert len(videos) == len(PROMPTS)
    assert read_video(videos[0])[0].shape[:2] == (7, 3)
    stopped = config.with_settings(output_dir=str(tmp_path / "stopped"))
    trained(stopped.with_settings(max_steps=1), mesh)
    resumed = trained(stopped.with_settings(resume_from_checkpoint="latest"), mesh)
    expected = uninterrupted.run.policy.tensors()
    for name, tensor in resumed.run.policy.tensors().items():
        assert torch.equal(tensor, expected[name]), name


def test_frames_are_checked_with_the_ratio_of_the_vae(config):
    config = config.with_settings(reward_model=["miniature"])
    with pytest.raises(ValueError, match="sample_n_frames .*7 or 13"):
        check(config.with_settings(sample_n_frames=9))
    check(config.with_settings(sample_n_frames=13))


def test_the_size_must_be_a_multiple_of_ratio_and_patch(config, mesh):
    with pytest.raises(ValueError, match="height must be a multiple of 24, got 64"):
        trained(config.with_settings(height=64), mesh)


@pytest.mark.system
def test_the_policy_of_a_run_is_exported_and_generates_videos(
    config, mesh, tmp_path, monkeypatch, capsys
):
    trained(config, mesh)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "000002")
    out = tmp_path / "videos"
    flags = ["--checkpoint_path", checkpoint, "--prompt", PROMPTS[0], "--output_path", str(out)]
    flags += ["--num_inference_steps", "2", "--device", "cpu", "--vae_tile_size", str(TILE)]
    monkeypatch.setattr(sys, "argv", ["generate.py", *flags])
    assert generate.main() == 0, capsys.readouterr().err
    assert len(read_video(out / "0000.mp4")[0]) == SIZE[0]
    settings = json.loads((out / "0000.json").read_text())
    assert (settings["height"], settings["width"]) == SIZE[1:]
    flags = ["--checkpoint_path", checkpoint, "--output_dir", str(tmp_path / "exported")]
    monkeypatch.setattr(sys, "argv", ["export.py", *flags])
    export.main()
    written = json.loads((tmp_path / "exported" / "transformer" / "config.json").read_text())
    assert written["_class_name"] == "MochiTransformer3DModel"
    monkeypatch.setattr(sys, "argv", ["export.py", *flags[:-1], "elsewhere", "--form", "original"])
    with pytest.raises(SystemExit):
        export.main()
    assert "only in diffusers' layout" in capsys.readouterr().err


def test_the_planner_reads_the_ratios(root, monkeypatch, capsys):
    sizes = read_architecture(root, "of_my_own")
    assert sizes.latent_size(*SIZE) == (2, 2, 4) and sizes.out_channels == 12
    frames, height, width = map(str, SIZE)
    flags = ["--family", FOLDER, "--pretrained_model_root", str(root)]
    flags += ["--transformer_version", "of_my_own", "--height", height, "--width", width]
    flags += ["--device", "cuda", "--print_config"]
    monkeypatch.setattr(sys, "argv", ["post_train.py", *flags, "--sample_n_frames", frames])
    assert post_train.main() == 0
    assert "for 4 video tokens" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["post_train.py", *flags, "--sample_n_frames", "9"])
    assert post_train.main() == 2
    assert "must be 6n + 1" in capsys.readouterr().err


# --- tiles ----------------------------------------------------------------------------------------


def decoded(root, tiles=None):
    vae = load_vae(root)
    set_tiling(vae, Tiling(TILE, 0.5))
    latents = torch.randn(1, 12, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return decode(vae, latents, tiles)


def test_tiles_of_a_decoder_that_returns_a_cache_give_the_same_video(root):
    shown = []
    video = decoded(root, Tiles(None, lambda loop: shown.extend(loop) or shown))
    assert video.shape == (1, 3, 7, 48, 36)
    assert torch.equal(video, decoded(root))
    assert len(shown) == 4 * 3
