"""Tests of the rehearsal: it keeps the sizes of a run, its models have the released structure, and
it finds faults.
"""

import os
import signal
import sys

import pytest
import torch

from hyvideo.checks.layout import planned_world_size
from hyvideo.checks.rules import check
from hyvideo.files.files import ROOT
from hyvideo.models.encoders import load_tokenizer
from hyvideo.models.family import families
from hyvideo.models.loading import load_vae
from hyvideo.models.sizes import read_architecture, released_sizes, tiny_module
from hyvideo.models.versions import RELEASED
from hyvideo.rehearsal import settings as rehearsal
from hyvideo.rehearsal import stand_ins
from hyvideo.rehearsal.stages import Stage, run_stage, stages_of
from hyvideo.settings.command_line import load_config
from scripts import rehearse
from tests.cuda.recipes import released_recipes
from tests.forked import python

SHIPPED = [
    pytest.param(ROOT / "configs" / f"{each.name}.yaml", id=each.name)
    for each in released_recipes()
]
VIDEO = {
    "sample_n_frames",
    "height",
    "width",
    "fps",
    "validation_num_frames",
    "validation_height",
    "validation_width",
}
SAMPLING = {
    "grpo_sampling_steps",
    "validation_steps",
    "sde_type",
    "eta",
    "shift",
    "cfg_scale",
    "sde_window",
}
TRAINING = {
    "objective",
    "num_updates_per_rollout",
    "kl_strategy",
    "learning_rate",
    "lora_rank",
    "enable_fsdp",
}
REWARD = {
    "reward_model",
    "reward_weights",
    "offload",
}
KEPT = (
    VIDEO
    | SAMPLING
    | TRAINING
    | REWARD
    | {"prompts_csv", "sp_size", "precompute_conditions", "base_weight_dtype"}
)


def rehearsed(config, tmp_path):
    """Return the processes and the settings of the rehearsal of a run."""
    world_size = planned_world_size(config, str(config.record.output_dir))
    processes = rehearsal.processes_of(config) if world_size > 1 else 1
    changes = rehearsal.reduced(config, processes, folder=tmp_path, validated=True)
    return processes, config.with_settings(**{change.name: change.value for change in changes})


@pytest.mark.parametrize("path", SHIPPED)
def test_a_rehearsal_of_a_shipped_config_is_valid_and_keeps_what_determines_sizes_and_method(
    path, tmp_path
):
    config = load_config(path)
    processes, small = rehearsed(config, tmp_path)
    check(small, processes, on_this_machine=False)
    before, after = config.flat(), small.flat()
    assert {name: after.get(name) for name in KEPT} == {name: before.get(name) for name in KEPT}
    assert (small.sampling.size, small.validation_sampling.size) == (
        config.sampling.size,
        config.validation_sampling.size,
    )
    assert processes % config.distributed.sp_size == 0
    assert after["resume_from_checkpoint"] == "auto"  # the second stage continues the first
    assert after["max_steps"] == 1 and after["num_generations"] == (
        config.objective.group_size or 2
    )


def test_processes_have_the_layout_of_the_run():
    config = load_config(ROOT / "configs" / "hunyuanvideo15_480p_64gpu.yaml")
    assert rehearsal.processes_of(config) == 4  # two copies of two shards
    assert rehearsal.processes_of(config.with_settings(dp_replicate=1)) == 2
    assert rehearsal.processes_of(config.with_settings(dp_replicate=1, sp_size=4)) == 8


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["720p_i2v", "wan2.2_ti2v_5b"])
def test_a_thin_checkpoint_has_the_released_shapes_of_latents_and_tokens(version, tmp_path):
    prompt = "a boat with a yellow sail, gliding"
    family = RELEASED[version].family
    tiny_module(family).write(tmp_path, version, num_heads=4, prompts=[prompt])
    tiny, released = read_architecture(tmp_path, version), released_sizes(version)
    assert tiny.latent_size(121, 704, 1280) == released.latent_size(121, 704, 1280)
    assert tiny.image_tokens(81, 480, 832) == released.image_tokens(81, 480, 832)
    assert (tiny.patch, tiny.out_channels) == (released.patch, released.out_channels)
    assert tiny.num_attention_heads == 4 and tiny.width < released.width

    folders = [tmp_path / "text_encoder" / "llm", tmp_path / "tokenizer"]
    tokenizer = load_tokenizer(
        next(folder for folder in folders if folder.is_dir()), "PreTrainedTokenizerFast"
    )
    num_tokens = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    num_words = len(prompt.split())
    assert num_words <= num_tokens <= 2 * num_words  # the spaces may be tokens


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_enlarged_latents_have_the_shape_of_the_decoded_video(family, tmp_path):
    version = {"hunyuan_video15": "480p_t2v", "wan": "wan2.1_t2v_1.3b"}[family.name]
    tiny_module(family.name).write(tmp_path, version, num_heads=2, prompts=["a boat"])
    vae = load_vae(tmp_path)
    latents = torch.randn(2, family.latents(vae.config).channels, 2, 3, 4)
    with torch.no_grad():
        decoded = vae.decode(latents, return_dict=False)[0]
    assert stand_ins.enlarged(vae, latents).shape == decoded.shape
    latents.requires_grad_()
    with_gradient = stand_ins.enlarged_with_gradient(vae, latents, recompute=True)
    assert with_gradient.shape == decoded.shape
    assert torch.autograd.grad(with_gradient.sum(), latents)[0].any()
    latents = latents.detach()
    assert stand_ins.enlarged(vae, latents.bfloat16()).dtype == torch.bfloat16


# --- stages ---------------------------------------------------------------------------------------


def test_a_failed_stage_shows_the_exit_code_and_the_end_of_its_log(tmp_path):
    result = run_stage(
        Stage("train", ("post_train.py", "--no_such_flag"), has_stand_ins=False), tmp_path
    )
    assert result.problems[0] == "exit code 2"
    assert "--no_such_flag" in "\n".join(result.problems)
    assert result.log.read_text().count("--no_such_flag") == 1
    assert 0 < result.peak_gib < 4


def test_videos_that_nobody_rated_yet_are_named_with_the_programs_that_make_them(tmp_path, capsys):
    """A shipped config of DPO, rehearsed before any pair was rated."""
    config = ROOT / "configs" / "wan21_1gpu_dpo.yaml"
    flags = ["--pairs_csv", str(tmp_path / "pairs.csv")]
    with pytest.raises(SystemExit) as refused:
        rehearse.main(["--config", str(config), "--rehearsal_dir", str(tmp_path / "r"), *flags])
    shown = capsys.readouterr().err
    assert refused.value.code == 2
    assert all(part in shown for part in ("pairs_csv", str(tmp_path / "pairs.csv"), "scripts.rate"))


def test_a_refused_rehearsal_leaves_no_folder(tmp_path, capsys):
    folder = tmp_path / "new"
    config = ROOT / "configs" / "wan21_1gpu_nft.yaml"
    flags = ["--config", str(config), "--rehearsal_dir", str(folder)]
    with pytest.raises(SystemExit) as refused:
        rehearse.main([*flags, "--num_generations", "7"])
    assert refused.value.code == 2 and "num_generations" in capsys.readouterr().err
    assert not folder.exists()


def test_a_stopped_rehearsal_ends_its_stage(tmp_path):
    """Otherwise the stage would train on, for hours, on all processors."""
    code = (
        "import os, pathlib, signal, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        f"os.kill(os.getppid(), {int(signal.SIGTERM)})\n"
        "time.sleep(60)"
    )
    with pytest.raises(SystemExit) as ended:
        run_stage(Stage("train", ("-c", code), has_stand_ins=False), tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_used_folder_is_refused(tmp_path, capsys):
    (tmp_path / "own.txt").touch()
    config = str(ROOT / "configs" / "wan21_1gpu_nft.yaml")
    with pytest.raises(SystemExit) as refused:
        rehearse.main(["--config", config, "--rehearsal_dir", str(tmp_path)])
    assert refused.value.code == 2 and str(tmp_path) in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["own.txt"]


@pytest.mark.system
def test_the_smallest_recipe_trains_at_its_true_size(tmp_path, monkeypatch, capsys):
    """33 frames of 240 x 416, with fewer steps, levels and prompts; the other stages run with
    --slow.
    """
    first = lambda *arguments, **options: list(stages_of(*arguments, **options))[:1]  # noqa: E731
    monkeypatch.setattr("hyvideo.rehearsal.rehearsal.stages_of", first)
    monkeypatch.setattr(sys, "executable", python())
    (tmp_path / "prompts.csv").write_text("prompt\na boat with a yellow sail\na dog runs\n")
    (tmp_path / "valid.csv").write_text("prompt\na bird\n")
    code = rehearse.main(
        [
            "--config",
            str(ROOT / "configs" / "wan21_1gpu_nft.yaml"),
            "--rehearsal_dir",
            str(tmp_path / "rehearsal"),
            "--prompts_csv",
            str(tmp_path / "prompts.csv"),
            "--valid_video_csv",
            str(tmp_path / "valid.csv"),
            "--grpo_sampling_steps",
            "2",
            "--validation_steps",
            "2",
            "--nft_levels",
            "1",
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "train     passed" in shown


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED)
def test_a_shipped_config_passes_its_rehearsal(path, tmp_path, capsys):
    if load_config(path).objective.videos_from:
        pytest.skip("it trains on videos that do not exist yet")
    code = rehearse.main(["--config", str(path), "--rehearsal_dir", str(tmp_path / "rehearsal")])
    shown = capsys.readouterr().out
    assert code == 0, shown
    stages = stages_of(tmp_path, 1, has_validation=True, improves=False)
    assert shown.count(" passed ") == len(list(stages))


def test_commands_that_a_program_starts_have_the_stand_ins(tmp_path, forked_programs):
    """scripts.improve starts generate.py, scripts.evaluate and post_train.py."""
    (tmp_path / "step.py").write_text(
        "from pathlib import Path\n"
        "from hyvideo.models import attention\n"
        "kernel = attention.scaled_dot_product.__name__\n"
        f"Path({str(tmp_path / 'kernel')!r}).write_text(kernel)\n"
    )
    (tmp_path / "program.py").write_text(
        "from hyvideo.files.steps import run\n"
        f"raise SystemExit(run([{sys.executable!r}, {str(tmp_path / 'step.py')!r}]))\n"
    )
    result = run_stage(Stage("improve", (str(tmp_path / "program.py"),)), tmp_path)
    assert result.problems == []
    assert (tmp_path / "kernel").read_text() == "mean_attention"
