"""generate.py at the frames, sizes and tokens of the released models, with tiny models on a CPU.

Measured minutes and memory of each test: ``pytest --slow -s tests/true_sizes``.
"""

import csv
import json
import re

import numpy as np
import pytest
import torch
import yaml

import generate
from hyvideo.data.images import fit, read_image
from hyvideo.data.videos import read_video
from hyvideo.generation import program
from hyvideo.models.hunyuan_video15 import tiny
from tests.true_sizes.video_files import PROMPT, check_file

MAX_GIB = 5.0  # of a process, at 121 frames of 720 x 1280
FEW = ("--num_inference_steps", "1", "--device", "cpu")


def rgb(path):
    return read_video(path)[0].float()


# --- text to video ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("resolution, height, width", [("480p", 480, 864), ("720p", 720, 1280)])
def test_hunyuan_video_writes_every_frame_at_its_size(
    run, hunyuan, tmp_path, resolution, height, width
):
    result = run(
        "generate",
        *(
            "generate.py",
            "--model_path",
            hunyuan,
            "--resolution",
            resolution,
            "--prompt",
            PROMPT,
            *FEW,
        ),
        *("--height", height, "--width", width, "--output_path", tmp_path / "videos"),
    )
    settings = check_file(tmp_path / "videos" / "0000.mp4", (121, height, width), fps=24)
    assert (settings["height"], settings["width"]) == (height, width)
    assert (settings["version"], settings["prompt"], settings["steps"]) == (
        f"{resolution}_t2v",
        PROMPT,
        1,
    )
    assert result.peak_gib < MAX_GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, size, fps",
    [("wan2.1_t2v_1.3b", (81, 480, 832), 16), ("wan2.2_ti2v_5b", (121, 704, 1280), 24)],
)
def test_wan_writes_every_frame_at_its_default_size(run, wan, tmp_path, version, size, fps):
    result = run(
        "generate",
        *(
            "generate.py",
            "--model_path",
            wan(version),
            "--transformer_version",
            version,
            "--prompt",
            PROMPT,
            *FEW,
        ),
        *("--output_path", tmp_path / "videos"),
    )
    settings = check_file(tmp_path / "videos" / "0000.mp4", size, fps)
    assert (settings["frames"], settings["height"], settings["width"]) == size
    assert (settings["version"], settings["prompt"], settings["steps"]) == (version, PROMPT, 1)
    assert result.peak_gib < MAX_GIB


# --- image to video -----------------------------------------------------------------------------


def test_a_photo_of_12_megapixels_selects_the_nearest_size_and_covers_the_frame(photos):
    for name, expected in (("landscape", (544, 720)), ("portrait", (720, 544))):
        options = generate.parse(
            ["--prompt", PROMPT, "--resolution", "480p", "--image_path", str(photos[name])]
        )
        settings = program.generation_settings(options, has_images=True)
        assert program.size_of(options, settings, options.image_path) == expected
        photo = read_image(photos[name])
        frame = fit(photo, *expected)
        assert (frame.height, frame.width) == expected
        corners = np.asarray(frame)[:: expected[0] - 1, :: expected[1] - 1].astype(int)
        of_photo = np.asarray(photo)[:: photo.height - 1, :: photo.width - 1].astype(int)
        assert np.abs(corners - of_photo).max() < 60, (
            "the photo was cut, although its ratio is nearly the frame's"
        )


@pytest.mark.slow
@pytest.mark.parametrize("resolution, short, long", [("480p", 544, 720), ("720p", 832, 1104)])
def test_a_photo_of_12_megapixels_is_the_first_frame(
    run, hunyuan, photos, tmp_path, resolution, short, long
):
    frames = 33
    prompts = tmp_path / "prompts.csv"
    with prompts.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "ref_image_path", "seed"])
        rows.writerows([PROMPT, photos[name], 7] for name in ("landscape", "mirrored", "portrait"))
    run(
        "generate",
        *(
            "generate.py",
            "--model_path",
            hunyuan,
            "--resolution",
            resolution,
            "--valid_video_csv",
            prompts,
            *FEW,
        ),
        *("--video_length", frames, "--output_path", tmp_path / "videos"),
    )
    for number, (name, size) in enumerate(
        {"landscape": (short, long), "mirrored": (short, long), "portrait": (long, short)}.items()
    ):
        settings = check_file(tmp_path / "videos" / f"{number:04d}.mp4", (frames, *size), fps=24)
        assert (settings["height"], settings["width"]) == size
        assert (settings["version"], settings["image"]) == (f"{resolution}_i2v", str(photos[name]))
    landscape, mirrored = (rgb(tmp_path / "videos" / f"{number:04d}.mp4") for number in (0, 1))
    change = (landscape - mirrored).abs().mean(dim=(1, 2, 3))
    # The latents of the photo are an input at the first frame only; all others see them through
    # attention.
    assert change[0] > 3 * change[-1], change.tolist()


# --- super-resolution ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "resolution, base, refined",
    [
        ("480p", (480, 848), (720, 1280)),
        ("720p", (720, 1280), (1072, 1904)),
        ("720p", (720, 1264), (1088, 1904)),
    ],
)
def test_super_resolution_writes_both_sizes(run, hunyuan, tmp_path, resolution, base, refined):
    height, width = base
    run(
        "generate",
        *(
            "generate.py",
            "--model_path",
            hunyuan,
            "--resolution",
            resolution,
            "--prompt",
            PROMPT,
            *FEW,
        ),
        *("--height", height, "--width", width, "--video_length", 9),
        *("--sr", "--save_pre_sr_video", "--output_path", tmp_path / "videos"),
    )
    settings = check_file(tmp_path / "videos" / "0000.mp4", (9, *refined), fps=24)
    assert (settings["height"], settings["width"]) == base
    record = settings["super_resolution"]
    assert (record["height"], record["width"]) == refined
    assert (
        record["version"] == {"480p": "720p_sr_distilled", "720p": "1080p_sr_distilled"}[resolution]
    )
    before, _ = read_video(tmp_path / "videos" / "0000_before_sr.mp4")
    assert tuple(before.shape) == (9, 3, *base)


@pytest.mark.slow
def test_1088_lines_are_not_a_base_size_but_can_be_generated(run, hunyuan, tmp_path):
    run(
        "generate",
        *("generate.py", "--model_path", hunyuan, "--resolution", "720p", "--prompt", PROMPT, *FEW),
        *(
            "--height",
            1088,
            "--width",
            1920,
            "--video_length",
            9,
            "--output_path",
            tmp_path / "videos",
        ),
    )
    settings = check_file(tmp_path / "videos" / "0000.mp4", (9, 1088, 1920), fps=24)
    assert (settings["height"], settings["width"]) == (1088, 1920)


# --- step caching -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache, version, blocks_of_cached_steps",
    [
        ("deepcache", "480p_t2v", 1),
        ("teacache", "480p_t2v_distilled", 0),
        ("taylorcache", "480p_t2v_distilled", 0),
    ],
)
def test_step_caching_runs_all_blocks_at_the_documented_steps(
    run, hunyuan, tmp_path, cache, version, blocks_of_cached_steps
):
    counts = tmp_path / "counts.json"
    result = run(
        "generate",
        *(
            "tests/true_sizes/counted_blocks.py",
            counts,
            "generate.py",
            "--model_path",
            hunyuan,
            "--device",
            "cpu",
        ),
        *(
            "--transformer_version",
            version,
            "--prompt",
            PROMPT,
            "--enable_cache",
            "--cache_type",
            cache,
        ),
        *("--output_path", tmp_path / "videos"),
    )
    settings = check_file(tmp_path / "videos" / "0000.mp4", (121, 480, 848), fps=24)
    assert (settings["steps"], settings["step_caching"]["cache_type"]) == (50, cache)
    full_steps = {*range(11), *range(11, 45, 4), *range(45, 50)}  # documented: 11, 45 and 4
    assert len(full_steps) == 25, "half of all steps"
    passes = json.loads(counts.read_text())
    timesteps = [timestep for timestep, _ in passes]
    assert timesteps == sorted(timesteps, reverse=True) and len(set(timesteps)) == 50
    expected = [2 if step in full_steps else blocks_of_cached_steps for step in range(50)]
    assert [blocks for _, blocks in passes] == expected
    assert result.peak_gib < MAX_GIB


# --- several processes --------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_that_share_a_video_with_an_odd_number_of_tokens_match_one(
    run, hunyuan, tmp_path
):
    frames, height, width = 81, 464, 880
    assert (frames // 4 + 1) * (height // 16) * (width // 16) % 2 == 1
    for processes in (1, 2):
        run(
            f"processes_{processes}",
            *("tests/true_sizes/saved_latents.py", tmp_path / f"{processes}.pt"),
            *("generate.py", "--model_path", hunyuan, "--dtype", "fp32"),
            *(
                "--transformer_version",
                "480p_t2v_distilled",
                "--prompt",
                PROMPT,
                *FEW,
                "--sp_size",
                processes,
            ),
            *("--video_length", frames, "--height", height, "--width", width),
            *("--output_path", tmp_path / str(processes)),
            processes=processes,
        )
        settings = check_file(
            tmp_path / str(processes) / "0000.mp4", (frames, height, width), fps=24
        )
        assert settings["sp_size"] == processes
    one, two = (torch.load(tmp_path / f"{processes}.pt", weights_only=True) for processes in (1, 2))
    assert one.std() > 0.1
    assert (one - two).norm() < 1e-5 * one.norm()


# --- decoder ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_decoder_gives_the_same_video_in_tiles_of_two_processes(run, hunyuan, tmp_path):
    size = (17, 352, 624)
    config = tmp_path / "run.yaml"
    chosen = {
        "pretrained_model_root": str(hunyuan),
        "transformer_version": "480p_t2v",
        "vae_dtype": "bf16",
    }
    chosen |= dict(zip(("sample_n_frames", "height", "width"), size))
    config.write_text(yaml.safe_dump(chosen))
    for processes in (1, 2):
        run(
            f"processes_{processes}",
            *("tests/true_sizes/saved_latents.py", tmp_path / f"{processes}.pt"),
            *("generate.py", "--config", config, "--prompt", PROMPT, *FEW),
            *("--sp_size", processes, "--output_path", tmp_path / str(processes)),
            processes=processes,
            has_real_decoder=True,
        )
        settings = check_file(tmp_path / str(processes) / "0000.mp4", size, fps=24)
        assert (settings["vae_tile_size"], settings["vae_dtype"]) == (256, "bf16")
    one, two = (rgb(tmp_path / str(processes) / "0000.mp4") for processes in (1, 2))
    assert one.std() > 1
    assert (one - two).abs().mean() < 0.1


# --- many prompts -------------------------------------------------------------------------------


@pytest.mark.slow
def test_100_long_prompts_with_quotes_and_seeds_are_all_generated(run, tmp_path):
    words = "a small red kite rises over the harbor while two children run along the pier and the".split()
    numbers = torch.randint(
        len(words), (100, 300), generator=torch.Generator().manual_seed(0)
    ).tolist()
    prompts = [
        f'number {row} " the sign says OPEN {row} " ' + " ".join(words[number] for number in chosen)
        for row, chosen in enumerate(numbers)
    ]
    too_long = " ".join(["kite"] * 1012)
    tiny.write(tmp_path / "tiny", "480p_t2v", num_heads=2, prompts=[*prompts, too_long])
    file = tmp_path / "prompts.csv"
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["prompt", "seed"])
        rows.writerows([prompt, 1000 + row] for row, prompt in enumerate(prompts))
        rows.writerow([too_long, 1])
    result = run(
        "generate",
        *(
            "generate.py",
            "--model_path",
            tmp_path / "tiny",
            "--resolution",
            "480p",
            "--valid_video_csv",
            file,
            *FEW,
        ),
        *("--height", 32, "--width", 48, "--video_length", 5, "--output_path", tmp_path / "videos"),
    )
    videos = tmp_path / "videos"
    assert len(list(videos.glob("*.mp4"))) == 101
    for row, prompt in enumerate(prompts):
        settings = check_file(videos / f"{row:04d}.mp4", (5, 32 * 8, 48 * 8), fps=24)
        assert (settings["prompt"], settings["seed"]) == (prompt, 1000 + row)
    (num_tokens,) = re.findall(
        r"a prompt has (\d+) tokens, but the model reads at most 1000", result.log.read_text()
    )
    assert 1012 <= int(num_tokens) < 1040  # one for each word, and the end of the template
