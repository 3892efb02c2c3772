"""Settings that are unset are those of the version, alike in training and in generation; given ones
always win.
"""

import json
from dataclasses import replace

import pytest
import torch

import generate
from hyvideo.generation import program
from hyvideo.models.versions import ANNOUNCED, RELEASED, version_defaults
from hyvideo.records.run_files import write_config
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import LEAVES, Config
from hyvideo.settings.identity import changed_settings
from tests.forked import ROOT

WAN = "wan2.1_t2v_1.3b"
VERSIONS = [*RELEASED, *ANNOUNCED, "miniature", "miniature_wan", "miniature_wan_ti2v", "not_listed"]
# Values that differ from those of Wan.
GIVEN = {
    "vae_dtype": "fp32",
    "negative_prompt": "",
    "fps": 30.0,
    "shift": 4.0,
    "cfg_scale": 2.0,
    "validation_steps": 7,
    "validation_eta": 0.4,
}
OF_REFERENCE = (
    "--vae_precision fp32 --neg_prompt none --video_fps 30 --infer_flow_shift_video 4 --cfg_scale 2"
)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def own_yaml(folder, version, **settings):
    """Write a YAML file with a version and ``settings``, and return its path."""
    path = folder / "own.yaml"
    path.write_text(json.dumps({"transformer_version": version} | settings))
    return str(path)


def generated(*flags):
    """Return the settings of generate.py, and how it samples a video."""
    options = generate.parse(["--prompt", "a", *flags])
    return program.sampling_of(options, has_images=False)


def by_version(config):
    return {name: value for name, value in config.flat().items() if name in GIVEN}


def expected(version):
    row = version_defaults(version)
    return {
        "vae_dtype": row.vae_dtype,
        "negative_prompt": row.negative_prompt,
        "fps": row.fps,
        "shift": row.shift,
        "cfg_scale": row.guidance_scale,
        "validation_steps": row.num_steps,
        "validation_eta": 1.0 if row.native == "renoise" else 0.0,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_training_and_generation_use_the_settings_of_the_version(version, tmp_path):
    run = parse(["--config", own_yaml(tmp_path, version)]).config
    assert by_version(run) == expected(version)
    config, sampling = generated("--transformer_version", version)
    assert config.with_settings(enable_compile="auto") == run
    # rollouts may be shorter
    assert sampling == replace(run.validation_sampling, frames=version_defaults(version).num_frames)
    assert run.data.sample_n_frames == Config().data.sample_n_frames
    of_run, sampling = generated("--config", own_yaml(tmp_path, version))
    assert of_run == config and sampling == run.validation_sampling


def test_a_run_of_wan_has_its_frame_rate_its_negative_prompt_and_a_vae_in_bf16(tmp_path):
    config = load_config(own_yaml(tmp_path, WAN))
    assert (config.data.fps, config.model.vae_dtype, config.record.validation_steps) == (
        16.0,
        "bf16",
        50,
    )
    (negative,) = config.negative_requests
    assert negative.prompt.startswith("色调艳丽，过曝，静态") and negative.prompt.endswith("倒着走")
    assert load_config(own_yaml(tmp_path, "480p_t2v")).data.negative_prompt == ""


def test_a_given_value_wins_over_the_version(tmp_path):
    assert not [name for name, value in expected(WAN).items() if value == GIVEN[name]]
    in_file = own_yaml(tmp_path, WAN, **GIVEN)
    assert by_version(parse(["--config", in_file]).config) == GIVEN
    assert by_version(generated("--config", in_file)[0]) == GIVEN
    assert parse(["--config", in_file]).of_version == []
    own = own_yaml(tmp_path, WAN)
    assert parse(["--config", own, "--fps", "30"]).of_version == [
        name for name in expected(WAN) if name != "fps"
    ]
    flags = [f"--{name}={value}" for name, value in GIVEN.items()]
    assert by_version(parse(["--config", own, *flags]).config) == GIVEN
    flags = ["--config", own, *OF_REFERENCE.split(), "--validation_num_inference_steps", "7"]
    flags += ["--validation_eta", "0.4"]  # which the public reference lacks
    assert by_version(parse(flags).config) == GIVEN
    flags = [
        "--negative_prompt=",
        "--shift",
        "4",
        "--guidance_scale",
        "2",
        "--num_inference_steps",
        "7",
    ]
    config, sampling = generated("--transformer_version", WAN, "--video_length", "9", *flags)
    of_version = {"vae_dtype": "bf16", "fps": 16.0, "validation_eta": 0.0}
    assert by_version(config) == GIVEN | of_version
    found = (sampling.shift, sampling.guidance_scale, sampling.steps, sampling.negative_prompt)
    assert (sampling.frames, *found) == (9, 4.0, 2.0, 7, "")


def test_the_settings_of_the_version_are_unset_by_default_and_say_so():
    unset, resolved = Config().flat(), Config().resolved().flat()
    names = {name for name, value in unset.items() if value is None and resolved[name] is not None}
    assert names == GIVEN.keys()
    assert {
        name
        for name, traits in LEAVES.items()
        if "default: the value of the version" in traits.sentence
    } == names


def test_without_guidance_the_negative_prompt_is_not_encoded(tmp_path):
    path = own_yaml(tmp_path, WAN, cfg_scale=1, prompts_csv="assets/miniature/prompts/smoke.csv")
    config = load_config(path, num_generations=2)
    assert config.data.negative_prompt and not config.negative_requests


@pytest.mark.parametrize("name", ["wan21_1gpu_guidance", "wan21_8gpu_guidance"])
def test_the_guided_anchor_of_a_shipped_recipe_is_the_guided_base_model_of_generate(name):
    """The anchor is sampled with the negative prompt of the model's authors, which generate.py also
    uses.
    """
    config = load_config(f"configs/{name}.yaml")
    assert config.num_branches == 1 and config.anchor_cfg_scale > 1
    _, base = generated("--transformer_version", config.model.transformer_version)
    assert config.negative_requests == base.negative_requests != []


@pytest.mark.parametrize("version", [WAN, "480p_i2v_step_distilled"])
def test_config_yaml_of_a_run_contains_the_values_that_it_used(version, tmp_path):
    config = load_config(own_yaml(tmp_path, version), reward_weights='{"VQ": 1}')
    write_config(tmp_path, config.flat(), torch.device("cpu"), world_size=1)
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == config
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    # readable, without escapes
    assert f"negative_prompt: {config.data.negative_prompt or repr('')}" in text


# Values that differ from the defaults of the version.
OTHER_VALUES = {"fps": 24.0, "vae_dtype": "fp16", "negative_prompt": "", "validation_steps": 40}


def test_a_run_with_other_values_than_its_version_resumes_with_its_config_yaml(tmp_path):
    saved = Config.of_version(WAN).with_settings(**OTHER_VALUES).flat()
    write_config(tmp_path, saved, torch.device("cpu"), world_size=1)
    now = parse(["--config", str(tmp_path / "config.yaml")]).config
    assert changed_settings(saved, now.flat(), same_rollouts=True) == ({}, {})


def test_a_setting_missing_in_a_checkpoint_had_the_default_of_the_version():
    now = Config.of_version(WAN).flat()
    saved = {name: value for name, value in now.items() if name not in ("fps", "negative_prompt")}
    assert changed_settings(saved, now, same_rollouts=True) == ({}, {})
