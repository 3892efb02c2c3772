"""Tests of what a run and a generation print about a version: its license, and other steps than a
student was made for.
"""

import json

import pytest

import generate
from hyvideo.checks.rules import check
from hyvideo.generation import program
from hyvideo.schedulers.transitions import cps_transition
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.settings.plan_text import describe
from hyvideo.settings.version_notes import generation_notes, run_notes

ANYFLOW = "wan2.1_t2v_1.3b_anyflow"
FASTWAN = "wan2.2_ti2v_5b_fastwan"
LIGHTX2V = "480p_t2v_step_distilled"
LEVELS = (1.0, 0.757, 0.522, 0.0)
VALIDATED = {"valid_video_csv": "assets/miniature/prompts/smoke.csv"}


def config_of(version, **settings):
    return Config().with_settings(transformer_version=version, **settings).resolved()


def warnings(rows):
    return [text for label, text in rows if label == "WARNING"]


def test_the_license_of_a_version_is_the_first_line_of_the_plan():
    config = config_of(ANYFLOW, grpo_sampling_steps=4)
    first = describe(config, make_plan(config)).splitlines()[0]
    assert first.split(maxsplit=1) == [
        "license",
        f"{ANYFLOW}: NVIDIA One-Way Noncommercial License",
    ]
    assert generation_notes(config.model, config.sampling)[0] == run_notes(config)[0]
    other = config_of("480p_t2v")
    assert run_notes(other) == generation_notes(other.model, other.sampling) == []


def test_other_steps_than_those_of_a_student_are_a_warning_that_names_both():
    assert warnings(run_notes(config_of(LIGHTX2V, grpo_sampling_steps=4, **VALIDATED))) == []
    (warning,) = warnings(run_notes(config_of(LIGHTX2V, grpo_sampling_steps=8, **VALIDATED)))
    assert LIGHTX2V in warning and "4 steps" in warning and "8 steps" in warning
    other = config_of(LIGHTX2V, grpo_sampling_steps=4, validation_steps=6, **VALIDATED)
    assert "validation" in warnings(run_notes(other))[0]
    without = other.with_settings(valid_video_csv=[])
    assert warnings(run_notes(without)) == []
    # The steps of other versions are a matter of time and quality.
    assert warnings(run_notes(config_of("480p_t2v", grpo_sampling_steps=3, **VALIDATED))) == []


def test_a_student_made_by_loras_names_those_that_are_missing():
    student = "wan2.2_t2v_a14b_4step"
    one = config_of(student, grpo_sampling_steps=4, base_lora_path="high.safetensors")
    (warning,) = warnings(run_notes(one))
    assert "set low_noise_base_lora_path," in warning
    both = {"base_lora_path": "high.safetensors", "low_noise_base_lora_path": "low.safetensors"}
    assert warnings(run_notes(one.with_settings(**both))) == []
    assert warnings(run_notes(config_of("wan2.2_t2v_a14b"))) == []


# --- a version that samples with noise --------------------------------------------------------------


def own_steps():
    """Return the steps of the sampler that adds new noise after each step but the last."""
    steps = [cps_transition(*pair, 1.0, LEVELS[1]) for pair in zip(LEVELS, LEVELS[1:])]
    assert steps[-1].std == 0 and steps[0].std == LEVELS[1]
    return tuple(steps)


def test_the_validation_of_fastwan_adds_new_noise_whatever_the_sampler_of_the_rollouts():
    sde_type = "sage_grpo"
    config = config_of(FASTWAN, sde_type=sde_type, **VALIDATED)
    assert config.validation_sampling.noise == "cps:1"
    assert config.validation_sampling.transitions() == own_steps()
    ode = config_of(FASTWAN, sde_type=sde_type, validation_eta=0.0)
    assert ode.validation_sampling.noise == "" and ode.sampling.sampler == sde_type
    other = config_of("480p_t2v", sde_type=sde_type, validation_eta=0.3)
    assert other.validation_sampling.noise == f"{sde_type}:0.3"


def generated(*flags):
    """Return the steps of generate.py."""
    options = generate.parse(["--prompt", "a", *flags])
    return program.sampling_of(options, has_images=False)[1].transitions()


def test_a_generation_with_fastwan_adds_new_noise(tmp_path):
    version = ("--transformer_version", FASTWAN)
    assert generated(*version) == own_steps()
    ode = generated(*version, "--stochastic", "cps", "--eta", "0")
    assert [step.std for step in ode] == [0, 0, 0]
    assert len(generated(*version, "--num_inference_steps", "4")) == 4
    # A run may validate with noise, too.
    own = tmp_path / "own.yaml"
    own.write_text("transformer_version: 480p_t2v\nsde_type: cps\nvalidation_eta: 0.5\n")
    assert generated("--config", str(own))[0].std > 0
    own.write_text("transformer_version: 480p_t2v\nsde_type: cps\n")
    assert generated("--config", str(own))[0].std == 0


def test_a_run_of_fastwan_is_checked_with_its_own_sampler(tiny_config):
    settings = {"transformer_version": FASTWAN, "validation_eta": 1.5, **VALIDATED}
    with pytest.raises(ValueError, match="validation_eta 1.5"):
        check(tiny_config.with_settings(**settings))


def write_pipeline(root, **configs):
    for name, config in ({"index": {"_class_name": "WanPipeline"}} | configs).items():
        path = {"index": root / "model_index.json"}.get(name, root / name / f"{name}_config.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
    return str(root)


def test_another_shift_than_that_of_the_scheduler_is_a_line(tmp_path):
    """Videos of the same weights in diffusers look different."""
    root = write_pipeline(tmp_path, scheduler={"flow_shift": 3.0})
    config = config_of("wan2.1_t2v_1.3b", pretrained_model_root=root, **VALIDATED)
    rows = [text for label, text in run_notes(config) if label == "shift"]
    assert [row.split(";")[0] for row in rows] == ["8 for rollouts", "8 for validation"]
    assert all(row.endswith("has 3") for row in rows)
    same = config.with_settings(shift=3.0, validation_shift=4.0).resolved()
    assert [row[1][:16] for row in run_notes(same)] == ["4 for validation"]
    given = config.with_settings(sigmas="1,0.7", grpo_sampling_steps=2, valid_video_csv=[])
    assert run_notes(given.resolved()) == []
    write_pipeline(tmp_path, scheduler={"shift": 1.0, "use_dynamic_shifting": True})
    assert run_notes(config) == []
    # the authors' layout has one scheduler for all versions
    write_pipeline(tmp_path, scheduler={"flow_shift": 3.0})
    (tmp_path / "model_index.json").unlink()
    assert run_notes(config) == []


def test_a_model_with_distilled_guidance_under_the_name_of_its_base_is_a_warning(tmp_path):
    root = write_pipeline(tmp_path, guider={"guidance_scale": 1.0})
    base = config_of("480p_t2v", pretrained_model_root=root, cfg_scale=1.0)
    (warning,) = warnings(run_notes(base))
    assert "480p_t2v has guidance_scale 6" in warning and "has 1:" in warning
    assert run_notes(config_of("480p_t2v_distilled", pretrained_model_root=root)) == []
