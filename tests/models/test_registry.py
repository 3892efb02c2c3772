"""Families outside the repository: a folder, and what is wrong with others."""

import sys

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

from hyvideo.distributed.tiles import Tiles
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.models.family import families, family_of, family_of_config, model_class
from hyvideo.models.registry import packages, register
from hyvideo.models.sizes import read_architecture
from hyvideo.models.versions import RELEASED, UNSUPPORTED, version_defaults
from hyvideo.settings.command_line import parse
from tests.registered import registered

FAMILY = """
import dataclasses

from examples.mochi.family import FAMILY as MOCHI

FAMILY = dataclasses.replace(MOCHI, name="outside")
"""
VERSIONS = """
versions:
  outside1: {task: t2v, shift: 3.0, fps: 8.0}
unsupported:
  outside2: it has two transformers
"""


def write_family(folder, *, class_names='("OutsideModel", "AutoencoderKLCogVideoX")', **files):
    folder.mkdir(parents=True)
    contents = {"__init__": f"CLASS_NAMES = {class_names}\n", "family": FAMILY} | files
    for name, content in contents.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "versions.yaml").write_text(VERSIONS)
    return folder


@pytest.fixture
def outside(tmp_path):
    """The folder of a family, which is unknown after the test."""
    folder = write_family(tmp_path / "outside")
    with registered(""):
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "outside"]:
        del sys.modules[name]


def test_a_folder_is_found_by_its_class_names_and_brings_its_versions(outside):
    register(str(outside))
    register(str(outside))  # no effect
    assert packages()["OutsideModel"] == "outside"
    assert family_of("OutsideModel") is family_of_config({"_class_name": "OutsideModel"})
    assert [family.name for family in families()][-1] == "outside"
    assert version_defaults("outside1").family == RELEASED["outside1"].family == "outside"
    assert version_defaults("outside1").fps == 8 and "two" in UNSUPPORTED["outside2"]
    assert families()[0].name == "hunyuan_video15"  # files that name no class


def test_the_setting_registers_the_family_before_the_defaults_of_the_version(outside):
    config = parse(["--family", str(outside), "--transformer_version", "outside1"]).config
    assert (config.rollout.shift, config.data.fps) == (3.0, 8.0)


@pytest.mark.parametrize(
    "location, named",
    [
        ("no_such_folder", "no_such_folder"),
        ("{}/wan", "wan"),  # the name of a family
        ("{}/taken_a", "WanTransformer3DModel"),
    ],
)
def test_a_package_that_cannot_be_used_raises_an_error(tmp_path, location, named):
    write_family(tmp_path / "wan")
    write_family(tmp_path / "taken_a", class_names='("WanTransformer3DModel",)')
    before = dict(packages()), dict(RELEASED)
    with registered(""):
        with pytest.raises(ValueError, match=named):
            register(location.format(tmp_path))
        assert (dict(packages()), dict(RELEASED)) == before


def test_a_family_with_another_name_or_a_class_that_nobody_has_is_an_error(outside):
    """Both ended in a KeyError or an AttributeError of a run."""
    (outside / "family.py").write_text(FAMILY.replace('"outside"', '"inside"'))
    register(str(outside))
    with pytest.raises(ValueError, match="'outside', got 'inside'"):
        family_of("OutsideModel")
    with pytest.raises(ValueError, match=r"no class OutsideModel.*build="):
        model_class(family_of("WanModel").transformer._replace(class_name="OutsideModel"))


def test_a_class_of_no_family_is_an_error_that_names_the_setting(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text('{"_class_name": "OutsideModel"}')
    for check in (
        lambda: read_architecture(tmp_path, "mine"),
        lambda: family_of_config({"_class_name": "OutsideModel"}),
    ):
        with pytest.raises(ValueError, match="OutsideModel.* family "):
            check()
    (problem,) = check_checkpoint(tmp_path, "mine", [])
    assert "OutsideModel" in problem


def test_a_decoder_that_takes_the_cache_of_its_last_call_is_decoded_in_tiles(outside):
    """CogVideoX decodes the first three latent frames together, and then two at a time."""
    register(str(outside))
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_height=32,
        sample_width=48,
    ).eval()
    vae.enable_tiling()
    latents = torch.randn(1, 4, 5, 4, 6)
    shown = []
    with torch.no_grad():
        expected = vae.decode(latents).sample
        video = Tiles(None, lambda loop: shown.extend(loop) or shown).decode(vae, latents)
    assert torch.equal(video, expected) and video.shape[2] == 17
    assert len(shown) > 1
