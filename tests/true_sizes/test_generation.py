"""generate.py at the frames, sizes and tokens of the released models, with tiny models on a CPU.

Measured minutes and memory of each test: ``pytest --slow -s tests/true_sizes``.
"""

import csv

import numpy as np
import pytest
import torch

import generate
from hyvideo.data.images import fit, read_image
from hyvideo.data.videos import read_video
from hyvideo.generation import program
from tests.true_sizes.video_files import PROMPT, check_file

MAX_GIB = 5.0  # of a process, at 121 frames of 720 x 1280
FEW = ("--num_inference_steps", "1", "--device", "cpu")


def rgb(path):
    return read_video(path)[0].float()


# --- text to video ------------------------------------------------------------------------------


@pytest.mark.slow
def test_hunyuan_video_writes_every_frame_at_its_size(run, hunyuan, tmp_path):
    resolution, height, width = "720p", 720, 1280
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
def test_a_photo_of_12_megapixels_is_the_first_frame(run, hunyuan, photos, tmp_path):
    resolution, short, long = "480p", 544, 720
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
