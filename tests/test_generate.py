"""generate.py on a small checkpoint in the original layout: sizes, versions, images, LoRA,
checkpoints, bad input.
"""

import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import generate
from hyvideo.checkpoints.format import TENSORS
from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_video
from hyvideo.distributed.mesh import Mesh
from hyvideo.generation import flags as generate_flags
from hyvideo.generation import generation, generator, program, video_sampler
from hyvideo.generation.settings import GenerationSettings
from hyvideo.generation.step_caching import StepCaching
from hyvideo.generation.video_sampler import STAGE, VideoSampler
from hyvideo.generation.videos import Video
from hyvideo.loading import model_setup
from hyvideo.loading.video_latents import write_latents
from hyvideo.models import loading
from hyvideo.models.loading import load_transformer, stream_transformer
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.settings.config import Config
from hyvideo.settings.sections import DataSettings
from tests.distributed.launch import start
from tests.forked import python
from tests.rewards.chat_server import completion, endpoints
from tests.tiny_checkpoint import write_image, write_original

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "--height",
    "32",
    "--width",
    "48",
    "--video_length",
    "5",
    "--num_inference_steps",
    "2",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = write_original(tmp_path_factory.mktemp("tiny") / "ckpts", ("480p_t2v", "480p_i2v"))
    gc.freeze()  # the modules that this has imported: every run of the program collects garbage
    return root


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return write_image(tmp_path_factory.mktemp("images") / "image.png")


def model_flags(root):
    return ["--model_path", root, "--dtype", "fp32", "--vae_dtype", "fp32"]


@pytest.fixture
def make(root, tmp_path, monkeypatch, capsys):
    """A function that runs generate.py in this process and returns the exit code, the JSON files
    and the output.
    """

    def run(*flags, out="videos"):
        where = tmp_path / out
        arguments = [*model_flags(root), *flags, "--output_path", where]
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
        code = generate.main()
        settings = (
            [json.loads(path.read_text()) for path in sorted(where.glob("*.json"))]
            if where.is_dir()
            else []
        )
        return code, settings, capsys.readouterr()

    return run


THREE = ["--transformer_version", "480p_t2v", "--prompt", "one", "two", "three", *SMALL]


@pytest.fixture(scope="module")
def three_videos(root, tmp_path_factory):
    """The folder of a call with the flags `THREE`."""
    folder = tmp_path_factory.mktemp("three") / "videos"
    arguments = ["generate.py", *model_flags(root), *THREE, "--output_path", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, arguments)])
        assert generate.main() == 0
    return folder


@pytest.fixture
def videos(three_videos, tmp_path):
    """A copy of `three_videos`, where `make` writes."""
    return shutil.copytree(three_videos, tmp_path / "videos")


def pixels(path):
    return read_video(path)[0].float()


def test_a_version_sets_its_default_settings(make, tmp_path):
    code, (settings,), output = make(
        "--resolution", "480p", "--prompt", 'a sign says "OPEN"', *SMALL
    )
    assert code == 0, output.err
    assert (settings["version"], settings["shift"], settings["guidance_scale"]) == (
        "480p_t2v",
        5.0,
        6.0,
    )
    assert settings["image"] is None and settings["eta"] == 0
    video, fps = read_video(tmp_path / "videos" / "0000.mp4")
    assert len(video) == 5 and fps == 24
    assert (settings["height"], settings["width"]) == (32, 48)
    assert "1 mp4 in" in output.out and "by 480p_t2v" in output.out
    assert "%|" not in output.err, "a progress bar in a log"


def test_without_a_model_the_miniature_makes_a_video_of_any_prompt(tmp_path, monkeypatch, capsys):
    flags = ["--prompt", 'a sign that says "HELLO"', "--num_inference_steps", "1"]
    flags += ["--output_path", str(tmp_path / "v")]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["generate.py", *flags])
    assert generate.main() == 0
    assert "by miniature" in capsys.readouterr().out


def test_an_image_selects_the_image_to_video_version_and_changes_the_video(
    make, three_videos, tmp_path
):
    """Another image in the same file makes another video."""
    image = write_image(tmp_path / "first.png")
    flags = ["--resolution", "480p", "--prompt", "one", "--image_path", image, *SMALL]
    code, (settings,), output = make(*flags)
    assert code == 0, output.err
    assert settings["version"] == "480p_i2v" and settings["image"] == image
    video = tmp_path / "videos" / "0000.mp4"
    first = pixels(video)
    assert not torch.equal(first, pixels(three_videos / "0000.mp4"))
    with Image.open(image) as picture:
        picture.convert("L").convert("RGB").save(image)
    assert make(*flags)[0] == 0
    assert not torch.equal(pixels(video), first)


def test_a_rewritten_prompt_is_recorded_beside_the_video(make):
    with endpoints() as start:
        server = start(completion('a cat and a sign "OPEN"'))
        flags = ["--rewrite", json.dumps({"url": server.url, "model": "a-model"})]
        code, (settings,), output = make(
            "--resolution", "480p", "--prompt", "a cat", *flags, *SMALL
        )
    assert code == 0, output.err
    assert (settings["prompt"], settings["original_prompt"]) == ('a cat and a sign "OPEN"', "a cat")


def test_the_noise_depends_on_the_seed_of_the_row_or_on_the_seed_and_the_position():
    def noise(number, seed, *step, own=None, initial="default"):
        video = Video(Request("a cat", seed=own), 32, 48, number, Path("video.mp4"))
        pipeline = SimpleNamespace(latent_shape=lambda *size: (4, 2, 2, 3), device="cpu")
        return VideoSampler(DataSettings(), Mesh.single(), seed, initial, print).noise(
            pipeline, video, *step
        )

    assert torch.equal(noise(0, 3, own=7), noise(5, 4, own=7)) and torch.equal(
        noise(0, 3), noise(0, 3)
    )
    different = [
        noise(0, 3),
        noise(1, 3),
        noise(0, 4),
        noise(0, 3, own=7),
        noise(0, 3, own=8),
        noise(0, 3, 0),
    ]
    different += [noise(0, 3, STAGE), noise(0, 3, STAGE, "augmentation")]
    assert len({each.sum().item() for each in different}) == 8
    # The original draws bf16 numbers of a batch of one from torch's CPU generator.
    expected = torch.randn(
        1, 4, 2, 2, 3, generator=torch.Generator().manual_seed(123), dtype=torch.bfloat16
    ).float()
    assert torch.equal(noise(4, 123, initial="reference"), expected)
    assert torch.equal(noise(4, 123, STAGE, initial="reference"), expected)
    assert torch.equal(noise(4, 3, own=123, initial="reference"), expected)
    # noise of a step of an SDE
    assert torch.equal(noise(4, 123, 2, initial="reference"), noise(4, 123, 2))


def test_several_videos_of_a_prompt_cannot_share_a_seed(make, tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,seed\na cat,7\n")
    code, _, output = make("--valid_video_csv", tmp_path / "prompts.csv", "--num_videos", "2")
    assert (
        code == 2
        and "seeds in the CSV, got 2: the videos of a prompt would be identical" in output.err
    )


@pytest.mark.system
def test_several_processes_share_the_videos_and_match_one_process(three_videos, root, tmp_path):
    arguments = [*THREE, *model_flags(root), "--output_path", tmp_path / "shared"]
    assert [end.exception() for end in start(2, "generate.py", *arguments)] == [None, None]
    for number in range(3):
        one, two = (
            pixels(folder / f"{number:04d}.mp4") for folder in (three_videos, tmp_path / "shared")
        )
        assert (one - two).abs().max() <= 1


def test_sde_sampling_changes_the_video_and_is_repeatable(make, three_videos, tmp_path):
    flags = ["--transformer_version", "480p_t2v", "--prompt", "one", *SMALL]
    noisy = ["--stochastic", "flow_grpo", "--eta", "0.9"]
    code, (settings,), _ = make(*flags, *noisy, out="one")
    make(*flags, *noisy, out="again")
    assert code == 0 and (settings["sde_type"], settings["eta"]) == ("flow_grpo", 0.9)
    folders = (three_videos, tmp_path / "one", tmp_path / "again")
    ode, one, again = (pixels(folder / "0000.mp4") for folder in folders)
    assert torch.equal(one, again) and not torch.equal(ode, one)


@pytest.mark.system
def test_a_checkpoint_and_a_lora_change_the_video(make, root, tmp_path, monkeypatch):
    flags = ["--transformer_version", "480p_t2v", "--prompt", "a cat", *SMALL]
    transformer = load_transformer(root, "480p_t2v")
    save_lora(
        {"transformer_blocks.0.attn.to_q": LoraPair(torch.ones(1, 32), torch.ones(32, 1), 8.0)},
        tmp_path / "lora",
    )
    with torch.no_grad():
        transformer.proj_out.weight.mul_(0.5)
    transformer.save_pretrained(tmp_path / "checkpoint" / "transformer")
    make(*flags, out="base")
    read = []
    monkeypatch.setattr(
        loading,
        "stream_transformer",
        lambda *args, **rest: read.append(args) or stream_transformer(*args, **rest),
    )
    for name, extra in (
        ("tuned", ["--checkpoint_path", tmp_path / "checkpoint"]),
        ("lora", ["--lora_path", "lora"]),
    ):
        extra = [tmp_path / "lora" if flag == "lora" else flag for flag in extra]
        code, (settings,), output = make(*flags, *extra, out=name + "_videos")
        assert code == 0, output.err
        assert settings["checkpoint" if name == "tuned" else "lora"] == str(extra[1])
        assert len(read) == (0 if name == "tuned" else 1), (
            "a whole checkpoint needs no weights of the base model"
        )
        assert not torch.equal(
            pixels(tmp_path / "base" / "0000.mp4"), pixels(tmp_path / f"{name}_videos" / "0000.mp4")
        )


def test_the_command_of_the_reference_generates_the_prompts_of_the_csv(make, tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,seed\na dog,\na cow,7\n")
    line = (
        "--resolution 480p --fixed_size 32x48 --aspect_ratio 16:9 --seed 930 --num_inference_steps "
        "2 --offloading false --rewrite false --cfg_distilled false --enable_step_distill false "
        "--sparse_attn false --use_sageattn false --enable_cache false --cache_type deepcache "
        "--overlap_group_offloading false --sr false --save_pre_sr_video --image_path none "
        "--video_length 5 --guidance_scale 1 --device cpu --initial_noise reference "
        "--save_generation_config true --cache_start_step 11 --quant_type none"
    )
    code, settings, output = make(
        "--prompt", "a cat", "--valid_video_csv", tmp_path / "prompts.csv", *line.split()
    )
    assert code == 0, output.err
    assert [entry["prompt"] for entry in settings] == ["a dog", "a cow"]
    assert {(entry["height"], entry["width"], entry["image"]) for entry in settings} == {
        (32, 48, None)
    }
    assert [(entry["seed"], entry["initial_noise"]) for entry in settings] == [
        (930, "reference"),
        (7, "reference"),
    ]
    notes = [note for note in output.err.splitlines() if note.startswith("ignored flags: ")]
    assert notes == [
        "ignored flags: prompt; --valid_video_csv names the prompts",
        "ignored flags: save_pre_sr_video; without --sr there is no super-resolution",
        "ignored flags: sparse_attn, quant_type, save_generation_config; this program decides or "
        "lacks what they do in the reference",
        "ignored flags: aspect_ratio; --height and --width set the size",
        "ignored flags: cache_type, cache_start_step; enable_cache is not set",
    ]


@pytest.mark.parametrize(
    "flags, has_images, version",
    [
        ("--resolution 480p --cfg_distilled true", False, "480p_t2v_distilled"),
        (
            "--resolution 480p --enable_step_distill true --cfg_distilled false",
            True,
            "480p_i2v_step_distilled",
        ),
        ("--resolution 720p --enable_step_distill true", False, None),
        ("--transformer_version 480p_t2v_distilled --cfg_distilled false", False, None),
    ],
)
def test_distillation_flags_select_the_version_or_raise(monkeypatch, flags, has_images, version):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--negative_prompt", "blurry", *flags.split()])
    options = generate.parse()
    if version is None:
        with pytest.raises(
            ValueError,
            match="must (not )?be (cfg|step)_distilled with these flags|no listed version is [47]",
        ):
            program.sampling_of(options, has_images)
    else:
        config, _ = program.sampling_of(options, has_images)
        assert (config.model.transformer_version, config.data.negative_prompt) == (
            version,
            "blurry",
        )


def test_step_caching_changes_the_video_and_starts_anew_for_each(make, tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,seed\na cat,3\na cat,3\n")
    flags = ["--transformer_version", "480p_t2v", *SMALL, "--num_inference_steps", "5"]
    schedule = [
        "--total_steps",
        "5",
        "--cache_start_step",
        "2",
        "--cache_end_step",
        "5",
        "--cache_step_interval",
        "2",
    ]
    assert (
        make(*flags, "--prompt", "a cat", "--seed", "3", out="plain")[1][0]["step_caching"] is None
    )
    flags += ["--valid_video_csv", tmp_path / "prompts.csv"]
    code, settings, output = make(
        *flags, "--enable_cache", "--cache_type", "taylorcache", *schedule
    )
    assert code == 0, output.err
    recorded = {
        "cache_type": "taylorcache",
        "total_steps": 5,
        "cache_start_step": 2,
        "cache_end_step": 5,
    }
    assert settings[0]["step_caching"] == recorded | {
        "cache_step_interval": 2,
        "no_cache_block_id": [],
    }
    first, again = ((tmp_path / "videos" / name).read_bytes() for name in ("0000.mp4", "0001.mp4"))
    assert first == again != (tmp_path / "plain" / "0000.mp4").read_bytes()
    for changed, message in (
        ({"transformer_version": "480p_i2v_step_distilled"}, "a step-distilled version"),
        ({"guidance_interval": "0.2:0.8"}, "guidance_interval: each step must have the"),
    ):
        config = Config().with_settings(**changed).resolved()
        settings = GenerationSettings(
            config, config.validation_sampling, generation.Source(), seed=0
        )
        with pytest.raises(ValueError, match=f"--enable_cache cannot be combined with {message}"):
            generator._check_cache(settings, StepCaching())


def test_the_file_of_one_video_can_be_named(make, tmp_path):
    code, _, output = make(
        "--transformer_version", "480p_t2v", "--prompt", "a cat", *SMALL, out="cat.mp4"
    )
    assert code == 0, output.err
    assert (tmp_path / "cat.mp4").is_file() and (tmp_path / "cat.json").is_file()


@pytest.mark.parametrize(
    "flags, output",
    [
        ([], "no prompts: give --prompt or --valid_video_csv"),
        (
            ["--prompt", "a", "--initial_noise", "reference", "--num_videos", "2"],
            "--num_videos must be 1 with --initial",
        ),
        (
            ["--prompt", "a", "--fixed_size", "32x48", "--height", "64"],
            "--fixed_size 32x48 contradicts --height 64",
        ),
        (
            ["--prompt", "a", "--enable_cache", "--num_inference_steps", "25"],
            "--total_steps must equal the number of steps, 25, got 50; the default schedule is for "
            "50 steps. Scaled: --total_steps 25 --cache_start_step 6 --cache_end_step 22",
        ),
        (["--prompt", "a", "--eta", "0.5"], "--eta needs --stochastic: the ODE adds no noise"),
        (["--prompt", "a", "--image_path", "nowhere.png"], "got 'nowhere.png'"),
        (["--prompt", "a", "--last_image_path", "b.png"], "--last_image_path needs --image_path"),
        (["--prompt", "a", "--video_length", "6"], "into one latent frame, got 6; use 5 or 9"),
        (
            ["--prompt", "a", "--height", "40", "--width", "64"],
            "height must be a multiple of 16, got 40",
        ),
        (["--prompt", "a", "--checkpoint_path", "nowhere"], "nowhere does not exist"),
        (["--prompt", "a", "--lora_path", "nowhere"], "nowhere must be a safetensors file"),
        (["--prompt", "a", "--output_path", "generate.py/videos"], "generate.py/videos"),
        (["--prompt", "a", "--transformer_version", "720p_t2v"], "has no such folder"),
        (["--prompt", "a", "b", "--output_path", "one.mp4"], "must be a folder for 2 videos"),
    ],
)
def test_bad_input_exits_with_one_message_and_writes_nothing(
    root, tmp_path, monkeypatch, capsys, flags, output
):
    given = [
        "--model_path",
        root,
        "--transformer_version",
        "480p_t2v",
        "--output_path",
        tmp_path / "out",
        *flags,
    ]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, given)])
    assert generate.main() == 2
    assert output in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_flag_of_a_setting_is_checked_like_the_setting(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "a", "--stochastic", "euler"])
    assert generate.main() == 2
    message = capsys.readouterr().err
    assert "(given as --stochastic)" in message and "euler" in message


def test_mistakes_in_several_flags_are_reported_at_once(capsys):
    with pytest.raises(SystemExit):
        generate.parse("--prompt a --sp_size 0 --height 9000 --sr maybe --lora_path=".split())
    message = capsys.readouterr().err
    assert all(name in message for name in ("sp_size", "height", "sr", "lora_path")), message


def test_a_setting_of_training_has_the_same_name_here():
    names = ["--sample_n_frames", "5", "--cfg_scale", "2", "--validation_steps", "3"]
    flags = ["--video_length", "5", "--guidance_scale", "2", "--num_inference_steps", "3"]
    assert generate.parse(["--prompt", "a", *names]) == generate.parse(["--prompt", "a", *flags])
    assert generate.parse(["--prompt", "a"]).video_length is None


def test_a_lora_of_another_model_is_rejected_before_loading(make, tmp_path):
    save_lora(
        {"transformer_blocks.9.attn.to_q": LoraPair(torch.ones(1, 32), torch.ones(32, 1), 8.0)},
        tmp_path / "lora",
    )
    flags = ["--transformer_version", "480p_t2v", "--prompt", "a", "--lora_path", tmp_path / "lora"]
    code, written, output = make(*flags, *SMALL)
    assert (
        code == 2
        and "transformer_blocks.9.attn.to_q is not a linear layer" in output.err
        and not written
    )


def test_an_image_for_a_text_to_video_version_is_rejected(make, image):
    code, _, output = make(
        "--transformer_version", "480p_t2v", "--prompt", "a", "--image_path", image, *SMALL
    )
    assert code == 2 and "for text-to-video, got 1 reference images" in output.err


def test_an_image_to_video_version_needs_an_image(make):
    code, written, output = make("--transformer_version", "480p_i2v", "--prompt", "a", *SMALL)
    assert code == 2 and not written
    assert (
        "for image-to-video, got no reference image" in output.err and "--image_path" in output.err
    )


def test_a_checkpoint_sets_the_negative_prompt_and_a_config_sets_the_validation(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    validation = (
        "validation_num_frames: 9\nvalidation_shift: 7\nvalidation_height: 32\nnegative_prompt: "
        "blurry\n"
    )
    validation += "validation_cfg_scale: 3\n"
    (tmp_path / "run.yaml").write_text(Path("configs/smoke.yaml").read_text() + validation)
    (tmp_path / "state.json").write_text('{"settings": {"negative_prompt": "murky"}}')
    (tmp_path / TENSORS).mkdir()

    def sampled_settings(*flags):
        monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "a", *map(str, flags)])
        _, sampling = program.sampling_of(generate.parse(), has_images=False)
        return (
            *sampling.size,
            sampling.shift,
            sampling.guidance_scale,
            sampling.negative_prompt,
        )

    run = ["--config", tmp_path / "run.yaml"]
    assert sampled_settings(*run, "--checkpoint_path", tmp_path) == (9, 32, 16, 7, 3, "blurry")
    assert sampled_settings(*run, "--video_length", "13", "--shift", "2") == (
        13,
        32,
        16,
        2,
        3,
        "blurry",
    )
    assert sampled_settings(*run, "--stochastic", "cps") == (5, 16, 16, 3, 2, "blurry")
    assert sampled_settings("--checkpoint_path", tmp_path)[-1] == "murky"
    assert sampled_settings()[-1] == ""


def test_a_checkpoint_uses_the_settings_of_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    checkpoint = tmp_path / "run" / "checkpoints" / "000003"
    checkpoint.mkdir(parents=True)
    saved = {
        "width": 48,
        "height": 32,
        "sample_n_frames": 5,
        "cfg_scale": 2.0,
        "shift": 3.0,
        "a_setting_that_went": 1,
    }
    saved |= {
        "pretrained_model_root": "assets/miniature",
        "transformer_version": "miniature",
        "validation_steps": 4,
    }
    (checkpoint / "state.json").write_text(json.dumps({"settings": saved}))
    (checkpoint / TENSORS).mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        Path("configs/smoke.yaml").read_text() + "negative_prompt: murky\n"
    )

    def sampled_settings(folder, *flags):
        monkeypatch.setattr(
            sys, "argv", ["generate.py", "--prompt", "a", "--checkpoint_path", str(folder), *flags]
        )
        options = generate.parse()
        recipe = program.generation_settings(options, has_images=False)
        sampling = recipe.sampling
        size = program.size_of(options, recipe, None)
        return (sampling.frames, *size, sampling.steps, sampling.guidance_scale), recipe.config

    sampled, config = sampled_settings(checkpoint)
    assert (
        sampled == (5, 16, 16, 4, 2)
        and config.model.random_weights
        and config.data.negative_prompt == "murky"
    )
    note = f"using the settings of the checkpoint's run: {tmp_path / 'run' / 'config.yaml'}\n"
    assert capsys.readouterr().err == note
    given = [
        "--num_inference_steps",
        "9",
        "--guidance_scale",
        "1",
        "--height",
        "64",
        "--width",
        "32",
    ]
    assert sampled_settings(checkpoint, *given)[0] == (5, 64, 32, 9, 1)
    assert sampled_settings(checkpoint, "--resolution", "480p")[0][1:3] == (480, 848)
    capsys.readouterr()
    assert sampled_settings(checkpoint, "--config", "configs/miniature.yaml")[0] == (
        9,
        32,
        32,
        8,
        1,
    )
    assert "using the settings" not in capsys.readouterr().err
    moved = checkpoint.rename(tmp_path / "kept")
    assert sampled_settings(moved)[0] == (5, 32, 48, 4, 2)
    assert f"{moved / 'state.json'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, size",
    [
        (["--resolution", "480p"], (480, 848)),
        (["--resolution", "480p", "--aspect_ratio", "9:16"], (848, 480)),
        (["--resolution", "480p", "--height", "64", "--width", "32"], (64, 32)),
        ([], (32, 32)),
    ],
)
def test_the_size_comes_from_the_flags_or_the_resolution(monkeypatch, flags, size):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "a", *flags])
    options = generate.parse()
    generate_flags.convert_reference_flags(options)
    assert (
        program.size_of(options, program.generation_settings(options, has_images=False), None)
        == size
    )


def test_a_lora_is_added_with_its_scale(tmp_path, tiny_config, monkeypatch):
    transformer = loading.transformer_on_meta("assets/miniature", "miniature")
    name = "transformer_blocks.0.attn.to_q"
    out, into = transformer.get_submodule(name).weight.shape
    save_lora({name: LoraPair(torch.ones(2, into), torch.ones(out, 2), 4.0)}, tmp_path)
    transformer = load_transformer("assets/miniature", "miniature")
    monkeypatch.setattr(
        model_setup,
        "load_pipeline",
        lambda *_, **__: SimpleNamespace(transformer=transformer),
    )
    source = generation.Source(lora=tmp_path, lora_scale=0.25)
    source.load(tiny_config, torch.device("cpu"), None, None, frozenset())
    layer = transformer.get_submodule(name)
    added = layer(torch.ones(1, into)) - layer.base_layer(torch.ones(1, into))
    torch.testing.assert_close(added, torch.full((1, out), 0.25 * 4.0 / 2 * 2 * into))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "a.mp4")])
def test_an_error_while_videos_are_written_is_one_line(monkeypatch, capsys, error):
    monkeypatch.setattr(generate, "run", lambda options: (_ for _ in ()).throw(error))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "a"])
    assert generate.main() == 1
    assert capsys.readouterr().err == f"generate.py: {error}\n"


def test_a_stop_signal_deletes_the_temporary_files(root, tmp_path):
    flags = [
        "--model_path",
        root,
        "--transformer_version",
        "480p_t2v",
        *SMALL,
        "--num_inference_steps",
        "1000",
    ]
    command = [
        python(),
        "generate.py",
        *flags,
        "--prompt",
        "a cat",
        "--output_path",
        tmp_path / "videos",
    ]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT)
    while not [*tmp_path.glob("videos/.0000.*/*")]:
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not (tmp_path / "videos").exists()


def test_the_next_call_deletes_what_a_killed_one_left_also_of_complete_videos(make, videos):
    left = videos / ".0000.conditions-0.partial"
    left.mkdir()
    (left / "0.safetensors").touch()
    code, _, output = make(*THREE)
    assert code == 0 and "3 of 3 videos are complete" in output.err
    assert not left.exists()


def test_two_calls_cannot_write_to_one_folder(make, tmp_path, monkeypatch, in_use):
    monkeypatch.setattr(model_setup, "load_encoder", lambda *_: pytest.fail("loads the model"))
    with in_use(tmp_path / "videos"):
        code, _, output = make("--transformer_version", "480p_t2v", "--prompt", "a cat", *SMALL)
    assert code == 2 and f"{tmp_path}/videos' is in use" in output.err


def test_the_hash_of_the_policy_changes_with_its_files(tmp_path):
    assert generation.Source().policy_hash is None
    (tmp_path / "checkpoint").mkdir()
    hashes = set()
    for content in ("1", "2"):
        (tmp_path / "lora.safetensors").write_text(f"LoRA {content}")
        (tmp_path / "checkpoint" / "model.safetensors").write_text(content)
        hashes.add(generation.Source(lora=tmp_path / "lora.safetensors").policy_hash)
        hashes.add(generation.Source(tmp_path / "checkpoint").policy_hash)
    assert len(hashes) == 4 and None not in hashes


# --- a repeated command ----------------------------------------------------------------------------


def test_a_repeated_command_makes_the_videos_that_are_missing(make, videos):
    files = [videos / f"{number:04d}.mp4" for number in range(3)]
    contents = [file.read_bytes() for file in files]
    before = [file.stat().st_mtime_ns for file in files]
    files[1].unlink()
    files[2].with_suffix(".json").unlink()  # it was killed before it wrote the settings
    (videos / ".0001.mp4.abc.partial").write_text("killed while it was written")
    code, settings, output = make(*THREE)
    assert code == 0 and len(settings) == 3 and "1 of 3 videos" in output.err
    assert [file.read_bytes() for file in files] == contents
    after = [file.stat().st_mtime_ns for file in files]
    assert after[0] == before[0] and after[2] > before[2]
    assert not [path for path in videos.iterdir() if path.name.startswith(".")]


def test_a_complete_call_loads_no_model(make, videos, monkeypatch):
    monkeypatch.setattr(
        generator.model_setup, "load_encoder", lambda *_, **__: pytest.fail("loads the model")
    )
    assert make(*THREE)[0] == 0


@pytest.mark.parametrize("changed", [["--seed", "1"], ["--keep_latents"]])
def test_a_video_with_other_settings_is_made_again(make, videos, changed):
    video = videos / "0000.mp4"
    before = video.stat().st_mtime_ns
    code, _, output = make(*THREE, *changed)
    assert code == 0 and video.stat().st_mtime_ns > before, output.err


@pytest.mark.system
def test_a_process_that_hangs_reports_its_stage_and_video(make, tmp_path, monkeypatch):
    write = video_sampler.write_video
    monkeypatch.setattr(video_sampler, "write_video", lambda *args: time.sleep(1.0) or write(*args))
    (tmp_path / "run.yaml").write_text("timeout: 1\n")
    flags = ["--transformer_version", "480p_t2v", "--config", tmp_path / "run.yaml", *SMALL]
    code, _, output = make(*flags, "--prompt", "one")
    assert code == 0, output.err
    assert re.search(
        r"rank 0 .* has been in stage writing of video 0 for 0.5 s; stacks:", output.err
    )


@pytest.mark.parametrize("name", ["cat.safetensors", "cat.json"])
def test_files_that_do_not_belong_to_a_video_are_not_replaced(name, tmp_path):
    """The name of a video may also be that of a LoRA or of notes."""
    request = Request("a cat")
    video = tmp_path / "cat.mp4"
    contents = json.dumps({"notes": ["mine"]})
    (tmp_path / name).write_text(contents)
    if name.endswith(".safetensors"):
        save_file({"weight": torch.ones(2)}, tmp_path / name)
        contents = None
    with pytest.raises(ValueError, match=f"'{tmp_path}/{name}' would be replaced with the video"):
        generation.list_videos({request: (32, 48)}, [request], video)
    assert contents is None or (tmp_path / name).read_text() == contents


def test_settings_and_latents_of_an_earlier_video_may_be_replaced(tmp_path):
    request = Request("a cat")
    video = tmp_path / "cat.mp4"
    video.write_bytes(b"a video")
    write_latents(video, torch.ones(1, 1, 1, 1), vae_weights="")
    video.with_suffix(".json").write_text(json.dumps({"prompt": "a cat", "seed": 0}))
    assert len(generation.list_videos({request: (32, 48)}, [request], video)) == 1
