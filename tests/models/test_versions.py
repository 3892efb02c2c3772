import subprocess
import sys

import pytest

from hyvideo.models.versions import ANNOUNCED, RELEASED, UNSUPPORTED, Version, version_defaults


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
    assert version.num_steps == (12 if version.kind == "step_distilled" else 50)


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
