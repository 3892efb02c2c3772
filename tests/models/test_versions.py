import itertools
import subprocess
import sys
from contextlib import suppress

import pytest

from hyvideo.models.versions import (
    ANNOUNCED,
    RELEASED,
    UNSUPPORTED,
    Version,
    version_defaults,
    version_for,
)
from hyvideo.schedulers.transitions import parse_sigmas
from hyvideo.settings.config import Config


def test_the_version_of_the_paper_has_its_published_settings():
    version = version_defaults("480p_t2v")
    assert (version.guidance_scale, version.shift, version.num_steps) == (6.0, 5.0, 50)
    assert (version.resolution, version.task, version.kind) == ("480p", "t2v", "base")


@pytest.mark.parametrize(
    "name, shift",
    [
        ("480p_t2v", 5),
        ("480p_i2v", 5),
        ("720p_t2v", 9),
        ("720p_i2v", 7),
        ("480p_i2v_step_distilled", 7),
    ],
)
def test_the_shift_grows_with_resolution_and_differs_by_task(name, shift):
    assert version_defaults(name).shift == shift


@pytest.mark.parametrize("name", [name for name in [*RELEASED, *ANNOUNCED] if name[0].isdigit()])
def test_names_consist_of_resolution_task_and_kind(name):
    version = version_defaults(name)
    suffix = {"base": "", "cfg_distilled": "_distilled", "step_distilled": "_step_distilled"}[
        version.kind
    ]
    assert name == version.name == f"{version.resolution}_{version.task}{suffix}"


@pytest.mark.parametrize("name", [*RELEASED, *ANNOUNCED])
def test_distilled_versions_run_a_single_branch(name):
    version = version_defaults(name)
    assert (version.guidance_scale == 1.0) == (version.kind != "base")
    is_few_steps = version.kind == "step_distilled"
    assert version.num_steps in ((3, 4, 12) if is_few_steps else (50,))
    if version.sigmas:
        assert len(parse_sigmas(version.sigmas)) == version.num_steps


def test_the_students_of_others_name_their_license_and_none_is_a_default():
    licenses = {name: version.license for name, version in RELEASED.items() if version.license}
    assert licenses == {
        "480p_t2v_step_distilled": "see the model card of lightx2v/Hy1.5-Distill-Models",
        "wan2.1_t2v_1.3b_anyflow": "NVIDIA One-Way Noncommercial License",
        "wan2.1_t2v_14b_anyflow": "NVIDIA One-Way Noncommercial License",
        "wan2.2_ti2v_5b_fastwan": "Apache-2.0",
    }
    assert not version_defaults(Config().model.transformer_version).license
    # --resolution selects a version by its properties
    for resolution, task, kind in itertools.product(
        ("480p", "720p"), ("t2v", "i2v"), ("base", "cfg_distilled", "step_distilled")
    ):
        with suppress(ValueError):
            license = version_defaults(version_for(resolution, task, kind)).license
            assert "Noncommercial" not in license


def test_each_name_is_in_only_one_list():
    assert not set(RELEASED) & set(UNSUPPORTED)
    assert not set(RELEASED) & ANNOUNCED
    assert all(reason for reason in UNSUPPORTED.values())


@pytest.mark.parametrize("name", [None, "", "miniature", "720p_i2v_distilled_sparse"])
def test_unlisted_models_have_the_defaults_and_no_family(name):
    version = version_defaults(name)
    is_miniature = name == "miniature"
    assert version == Version(
        name or "",
        "hunyuan_video15" if is_miniature else "",
        task=version.task,
        float32_rotary=is_miniature,
    )
    assert (version.guidance_scale, version.shift, version.num_steps, version.num_frames) == (
        6.0,
        5.0,
        40,
        121,
    )
    assert version.resolution is None and version.task == ("t2v" if name == "miniature" else None)


def test_versions_imports_no_heavy_packages():
    heavy = "{'torch', 'diffusers', 'transformers', 'numpy'}"
    code = f"import sys, hyvideo.models.versions; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
