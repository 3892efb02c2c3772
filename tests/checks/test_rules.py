"""Values and rules between settings: a message names the setting, and the value next to it is
legal.
"""

import pytest
from PIL import Image

from hyvideo.checks.layout import planned_world_size
from hyvideo.checks.rules import check
from hyvideo.models.versions import RELEASED
from hyvideo.rewards.rewards import DIMENSIONS, SCORERS, scorer_class
from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
from tests.forked import ROOT

PROMPTS = "assets/prompts/train.csv"
TEXT = "assets/miniature/prompts/smoke.csv"

# wrong settings, settings that the message names, and the changes that make them legal
CASES = [
    # numbers and choices
    ({"eta": -1.0}, "eta", {"eta": 0.001}),
    ({"grpo_sampling_steps": 0}, "grpo_sampling_steps", {"grpo_sampling_steps": 2}),
    ({"timestep_fraction": 1.5}, "timestep_fraction", {"timestep_fraction": 1.0}),
    ({"ema_decay": 1.0}, "ema_decay", {"ema_decay": 0.999}),
    # sampling
    ({"eta": 1.5, "sde_type": "cps"}, "eta", {"eta": 1.0}),
    ({"eta": 0.0}, "eta", {"eta": 0.0, "objective": "nft"}),
    ({"guidance_interval": "0.7:0.7"}, "guidance_interval", {"guidance_interval": "0.69:0.7"}),
    (
        {"guidance_interval": "0.3:0.45", "cfg_scale": 2.0},
        "guidance_interval",
        {"guidance_interval": "0.7:0.75"},
    ),
    (
        {"guidance_interval": "0.3:0.45", "anchor_cfg_scale": 2.0, "kl_strategy": "fixed"},
        "guidance_interval",
        {"guidance_interval": "0.3:0.5"},
    ),
    # sizes
    ({"sample_n_frames": 6}, "sample_n_frames", {"sample_n_frames": 9}),
    (
        {"validation_height": 16},
        "validation_height validation_width",
        {"validation_height": 16, "validation_width": 32},
    ),
    # batches and processes
    ({"batch_size": 6}, "batch_size num_generations", {"batch_size": 8}),
    ({"num_generations": 1}, "num_generations", {"num_generations": 2}),
    (
        {"num_updates_per_rollout": 3},
        "num_updates_per_rollout",
        {"num_updates_per_rollout": 2, "update_ref_model_step": 2},
    ),
    ({"sp_size": 2}, "sp_size", {"sp_size": 1}),
    (
        {"dp_replicate": 2, "enable_fsdp": True},
        "dp_replicate",
        {"dp_replicate": 1, "enable_fsdp": True},
    ),
    # the trust region
    (
        {"num_updates_per_rollout": 2, "update_ref_model_step": 3},
        "update_ref_model_step num_updates_per_rollout",
        {"kl_strategy": "dual_fixed"},
    ),
    ({"kl_coef": 1.0}, "kl_coef kl_weight", {"kl_coef": 0.5, "kl_weight": 0.5}),
    ({"kl_coef": 1.0}, "kl_coef kl_weight", {"kl_coef": 1.0, "kl_schedule": "constant"}),
    (
        {"anchor_cfg_scale": 3.0},
        "anchor_cfg_scale kl_strategy",
        {"kl_strategy": "dual_fixed", "ignore_rewards": True},
    ),
    ({"anchor_cfg_scale": 3.0}, "anchor_cfg_scale", {"anchor_cfg_scale": 1.0}),  # the policy's
    (
        {"ignore_rewards": True, "kl_strategy": "none", "kl_weight": 0.0},
        "ignore_rewards kl_strategy",
        {"kl_strategy": "fixed", "kl_weight": 0.1},
    ),
    # rewards
    ({"reward_model": ["miniture"]}, "reward_model miniature", {"reward_model": ["miniature"]}),
    (
        {"reward_model": ["miniature", "miniature"]},
        "reward_model",
        {"reward_model": ["miniature"], "held_out_reward_model": ["clip"]},
    ),
    (
        {"held_out_reward_model": ["miniature"]},
        "held_out_reward_model",
        {"held_out_reward_model": ["clip"]},
    ),
    ({"reward_weights": "{VQ"}, "reward_weights", {"reward_weights": "A"}),
    (
        {"reward_weights": '{"videoalign": {"VQ": 1}}'},
        "reward_weights reward_model",
        {"reward_weights": '{"miniature": {"VQ": 1}}'},
    ),
    (
        {"reward_weights": '{"miniature": {"CLIPScore": 1}}'},
        "reward_weights CLIPScore",
        {"reward_model": ["miniature", "clip"], "reward_weights": '{"VQ": 1, "clip": {"CLIPScore": 1}}'},
    ),
    ({"reward_model": ["yes_no"]}, "reward_weights checks", {"reward_weights": '{"checks": 1}'}),
    # weights
    ({"base_weight_dtype": "fp8"}, "base_weight_dtype lora_rank", {"lora_rank": 1}),
    (
        {"base_weight_dtype": "fp8", "lora_rank": 2, "enable_fsdp": True},
        "base_weight_dtype enable_fsdp",
        {"enable_fsdp": False},
    ),
    (
        {"lora_target_modules": ["attn"]},
        "lora_target_modules lora_rank",
        {"lora_target_modules": ["attn.to_q"], "lora_rank": 1},
    ),
    # records, files and folders
    (
        {"on_reward_hacking": "stop", "validate_at_step0": False, "valid_video_csv": PROMPTS},
        "on_reward_hacking validate_at_step0",
        {"validate_at_step0": True},
    ),
    ({"report_to": ["paper"]}, "report_to", {"report_to": ["none"]}),
    ({"pretrained_lora_path": "nowhere"}, "pretrained_lora_path", {"pretrained_lora_path": ""}),
    ({"prompts_csv": ""}, "prompts_csv", {"prompts_csv": PROMPTS}),
    ({"prompts_csv": "README.md"}, "README.md", {"prompts_csv": TEXT}),
    (
        {"pretrained_model_root": "nowhere"},
        "pretrained_model_root",
        {"pretrained_model_root": "assets/miniature"},
    ),
    ({"transformer_version": "../../etc"}, "transformer_version", {"transformer_version": "miniature"}),
    (
        {"transformer_version": "wan2.1_t2v_1.4b"},
        "transformer_version wan2.1_t2v_1.3b",
        {"transformer_version": "miniature"},
    ),
    ({"output_dir": "README.md/run"}, "output_dir", {"output_dir": "outputs/new"}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "wrong, named, changes", CASES, ids=[f"{number}-{case[1]}" for number, case in enumerate(CASES)]
)
def test_a_wrong_value_is_named_and_its_neighbor_is_legal(tiny_config, wrong, named, changes):
    with pytest.raises(ValueError) as error:
        check(tiny_config.with_settings(**wrong))
    assert [word for word in named.split() if word not in str(error.value)] == []
    check(tiny_config.with_settings(**wrong | changes))


def test_all_problems_are_reported_together(tiny_config):
    with pytest.raises(ValueError) as values:
        check(tiny_config.with_settings(eta=-1.0, grpo_sampling_steps=0))
    with pytest.raises(ValueError) as rules:
        check(tiny_config.with_settings(kl_coef=9.0, lora_target_modules=["a"], batch_size=3))
    assert len(str(values.value).splitlines()) == 2 and len(str(rules.value).splitlines()) == 3


# --- processes ------------------------------------------------------------------------------------


def test_an_8_gpu_config_on_one_gpu_says_how_to_start_it_and_what_else_to_use():
    path = "configs/hunyuanvideo15_480p_8gpu.yaml"
    config = load_config(path)
    with pytest.raises(ValueError) as error:
        check(config, 1, file=path, on_this_machine=False)
    for words in ("--nproc_per_node=8", "batch_size 4"):
        assert words in str(error.value)
    check(config, 8, file=path, on_this_machine=False)
    check(load_config("configs/hunyuanvideo15_1gpu.yaml"), 1, on_this_machine=False)
    check(config.with_settings(batch_size=4), 1, on_this_machine=False)


def test_a_batch_that_updates_do_not_divide_is_no_run_of_other_machines():
    """--batch_size 24 in a config for a CPU was planned as 8 processes, and printed as a plan."""
    path = "configs/miniature_nft.yaml"  # groups of 8, two updates
    config = load_config(path)
    for batch_size, fitting in ((24, 32), (20, 32), (33, 48)):
        wrong = config.with_settings(batch_size=batch_size)
        assert planned_world_size(wrong, path) == 1
        with pytest.raises(ValueError, match=f"use batch_size {fitting},") as error:
            check(wrong, 1, file=path, on_this_machine=False)
        assert "torchrun" not in str(error.value)
        check(config.with_settings(batch_size=fitting), 1, file=path, on_this_machine=False)
    part_of_a_group = config.with_settings(batch_size=2)
    assert planned_world_size(part_of_a_group, path) == 8


@pytest.mark.parametrize(
    "world_size, changes, named",
    [
        (2, {"batch_size": 2, "num_generations": 4}, None),
        (3, {"batch_size": 4, "num_generations": 6}, "batch_size num_generations"),
        (12, {"sp_size": 3}, None),  # heads may be split unevenly
        (8, {"sp_size": 3}, "sp_size"),
        (2, {"dp_replicate": 2}, "dp_replicate enable_fsdp"),
    ],
)
def test_rollouts_are_divided_evenly_over_the_processes(tiny_config, world_size, changes, named):
    config = tiny_config.with_settings(**{"batch_size": 4, "num_generations": 4} | changes)
    if named is None:
        check(config, world_size)
        return
    with pytest.raises(ValueError) as error:
        check(config, world_size)
    assert [word for word in named.split() if word not in str(error.value)] == []


def test_a_run_without_a_kl_strategy_has_no_kl_and_another_strategy_may_follow(tiny_config):
    config = tiny_config.with_settings(kl_strategy="none").resolved()
    assert config.objective.strategy == "none" and not any(config.objective.kl_weights)
    again = config.with_settings(kl_strategy="fixed").resolved()
    assert again.objective.strategy == "fixed" and again.objective.kl_weight > 0
    draft = {"objective": "draft", "kl_strategy": "none"}
    assert tiny_config.with_settings(**draft).resolved().objective.nft_levels == 0


# --- rewards --------------------------------------------------------------------------------------

OWN = """
class Own:
    dimensions = ("smooth", "red")
    def score(self, videos, prompts, *, fps): ...
    def check_prompts(self, prompts): ...
    def held_out(self, videos, prompts): ...
"""


def test_the_dimensions_of_a_custom_reward_have_weight_1_by_default(tiny_config, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:Own"
    config = tiny_config.with_settings(reward_model=[name])
    assert config.resolved().reward.reward_weights == '{"smooth": 1, "red": 1}'
    check(config.resolved())
    both = tiny_config.with_settings(reward_model=[name, "miniature"]).resolved()
    assert both.reward.reward_weights == tiny_config.reward.reward_weights
    given = config.with_settings(reward_weights='{"red": 2}').resolved()
    assert given.reward.reward_weights == '{"red": 2}'
    check(given)
    with pytest.raises(ValueError, match="reward_weights .*rde.* red"):
        check(config.with_settings(reward_weights='{"rde": 2}'))
    absent = tiny_config.with_settings(reward_model=[f"{tmp_path}/gone.py:Own"]).resolved()
    with pytest.raises(ValueError, match="gone.py"):
        check(absent)


@pytest.mark.parametrize("name", ["miniature", "clip", "pickscore", "videoalign"])
def test_the_registry_has_the_dimensions_of_the_classes(name):
    declared = getattr(scorer_class(name), "dimensions", DIMENSIONS)
    assert SCORERS[name].dimensions == declared


# --- versions -------------------------------------------------------------------------------------

MINIATURE = {
    "transformer_version": "miniature",
    "pretrained_model_root": str(ROOT / "assets/miniature"),
}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"transformer_version": "480p_i2v", "prompts_csv": "images.csv"}, ""),
        ({"width": 625}, "width 625"),
        ({**MINIATURE, "height": 33, "width": 32}, "height 33"),
        ({**MINIATURE, "height": 40, "width": 32}, ""),
        (
            {
                "anchor_cfg_scale": 6.0,
                "kl_strategy": "fixed",
                "transformer_version": "480p_t2v_distilled",
            },
            "anchor_cfg_scale 480p_t2v_distilled",
        ),
    ],
)
def test_limits_of_a_released_version_are_checked_without_its_files(
    tmp_path, monkeypatch, settings, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.csv").write_text("prompt\na\n")
    (tmp_path / "images.csv").write_text("prompt,ref_image_path\na,image.png\nb,\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    config = Config().with_settings(batch_size=4, **{"prompts_csv": "text.csv"} | settings)
    assert config.model.transformer_version in (*RELEASED, "miniature")
    message = ""
    try:
        check(config.resolved(), on_this_machine=False)
    except ValueError as error:
        message = str(error)
    assert [word for word in named.split() if word not in message] == []
    assert bool(message) == bool(named), message


def test_a_missing_package_is_named_with_the_command_that_installs_it(tiny_config, monkeypatch):
    is_installed = "hyvideo.checks.machine_rules.is_installed"
    config = tiny_config.with_settings(base_weight_dtype="fp8", lora_rank=2)
    monkeypatch.setattr(is_installed, lambda name: True)
    check(config)
    monkeypatch.setattr(is_installed, lambda name: name != "torchao")
    with pytest.raises(ValueError, match="pip install torchao"):
        check(config)
    check(tiny_config)
