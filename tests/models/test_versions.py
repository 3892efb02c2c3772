import pytest

from hyvideo.models.versions import (
    ANNOUNCED,
    RELEASED,
    Version,
    version_defaults,
)
from hyvideo.schedulers.transitions import parse_sigmas


def test_the_version_of_the_paper_has_its_published_settings():
    version = version_defaults("480p_t2v")
    assert (version.guidance_scale, version.shift, version.num_steps) == (6.0, 5.0, 50)
    assert (version.resolution, version.task, version.kind) == ("480p", "t2v", "base")


@pytest.mark.parametrize("name", [*RELEASED, *ANNOUNCED])
def test_distilled_versions_run_a_single_branch(name):
    version = version_defaults(name)
    assert (version.guidance_scale == 1.0) == (version.kind != "base")
    is_few_steps = version.kind == "step_distilled"
    assert version.num_steps in ((3, 4, 12) if is_few_steps else (40, 50))
    if version.sigmas:
        assert len(parse_sigmas(version.sigmas)) == version.num_steps


@pytest.mark.parametrize("name", [None, "", "720p_i2v_distilled_sparse"])
def test_unlisted_models_have_the_defaults_and_no_family(name):
    version = version_defaults(name)
    assert version == Version(name or "", family="")
    assert (version.guidance_scale, version.shift, version.num_steps, version.num_frames) == (
        6.0,
        5.0,
        40,
        121,
    )
    assert version.resolution is None and version.task is None
