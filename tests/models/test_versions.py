import itertools
from contextlib import suppress

import pytest

from hyvideo.models.versions import (
    ANNOUNCED,
    RELEASED,
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
