"""Thin checkpoints with the released structure, and runs of the project's programs at the released
sizes on a CPU.
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyvideo.models.hunyuan_video15 import tiny as tiny_hunyuan
from hyvideo.rehearsal.stages import Stage, StageResult, run_stage
from hyvideo.rewards import tiny as tiny_rewards
from tests.super_resolution_files import write_super_resolution

VERSIONS = ("480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v", "480p_t2v_distilled")
PHOTO_SIDES = (3000, 4000)  # 12 megapixels


@pytest.fixture(scope="session")
def hunyuan(tmp_path_factory) -> Path:
    """Return a tiny checkpoint of HunyuanVideo-1.5 with both super-resolution models, 190 MB."""
    root = tmp_path_factory.mktemp("true_sizes") / "hunyuan"
    settings = tiny_hunyuan.TinySettings()
    tiny_hunyuan.write_checkpoint(root, VERSIONS, settings, seed=0)
    for name in ("720p_sr_distilled", "1080p_sr_distilled"):
        write_super_resolution(root, name, settings.transformer, seed=1)
    return root


@pytest.fixture(scope="session")
def scorers(tmp_path_factory) -> Path:
    """Return a folder with a tiny reward model of each built-in scorer, below the scorer's name."""
    folder = tmp_path_factory.mktemp("true_sizes")
    for name in ("videoalign", "clip", "pickscore", "hpsv3"):
        tiny_rewards.write(name, folder / name)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> dict[str, Path]:
    """Return photos of 12 megapixels: landscape, the same mirrored, and portrait."""
    folder = tmp_path_factory.mktemp("true_sizes")
    short, long = PHOTO_SIDES
    coarse = np.random.default_rng(0).integers(
        0, 256, (short // 100, long // 100, 3), dtype=np.uint8
    )
    landscape = Image.fromarray(coarse).resize((long, short), Image.Resampling.BILINEAR)
    images = {
        "landscape": landscape,
        "mirrored": landscape.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "portrait": landscape.transpose(Image.Transpose.ROTATE_90),
    }
    for name, image in images.items():
        image.save(folder / f"{name}.jpg", quality=90)
    return {name: folder / f"{name}.jpg" for name in images}


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., StageResult]:
    """Return a function that runs a program with cheap stand-ins for attention and decoder, each
    process one thread.

    It fails the test if the exit code is not 0, and prints time and memory, which ``pytest -s``
    shows.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(name: str, *program: Any, **options: Any) -> StageResult:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run_stage(Stage(name, tuple(map(str, program)), **options), tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"\n{name}: {result.seconds:.0f} s, {computed:.0f} CPU s, {result.peak_gib:.2f} GiB "
            "per process"
        )
        assert not result.problems, "\n".join(
            [*result.problems, result.log.read_text(errors="replace")[-3000:]]
        )
        return result

    return run
