"""Identity of an evaluation: which changes affect it, and when a stored evaluation is reused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from hyvideo.checkpoints.format import DIGESTS, digest_files
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.settings.command_line import load_config
from hyvideo.validation import contents
from hyvideo.validation.contents import policy_identity
from hyvideo.validation.scores_file import Evaluation, read_evaluation, write_evaluation
from studies.recipes.runs import RecipeStudy
from studies.tables.table2 import evaluate_runs

CSV = "prompt,ref_image_path\na red circle moves up,\na blue square moves left,first.png\n"


@pytest.fixture
def world(tmp_path, tiny_config):
    """A config with copies of prompts, options and weights."""
    shutil.copytree("assets/miniature", tmp_path / "ckpts")
    (tmp_path / "prompts.csv").write_text(CSV)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "first.png")
    (tmp_path / "options.yaml").write_text("miniature_videoalign: {batch_size: 8}\n")
    return load_config(
        "configs/miniature.yaml",
        pretrained_model_root=str(tmp_path / "ckpts"),
        valid_video_csv=str(tmp_path / "prompts.csv"),
        reward_config=str(tmp_path / "options.yaml"),
    )


def joint_identity(config):
    return contents.joint_identity(config, config.reward)


def change_a_byte(path):
    """Change a byte of a file and keep its size and modification time."""
    content, found = bytearray(path.read_bytes()), path.stat()
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_identical_content_at_other_paths_has_the_same_identity(world, tmp_path):
    before = joint_identity(world)
    assert json.loads(json.dumps(before)) == before == joint_identity(world)
    shutil.copytree("assets/miniature", tmp_path / "moved")
    (tmp_path / "moved" / ".cache").mkdir()
    (tmp_path / "moved" / "vae" / ".notes").write_text("of a download")
    (tmp_path / "other").mkdir()
    for name in ("prompts.csv", "first.png"):
        shutil.copy(tmp_path / name, tmp_path / "other" / name)
    moved = world.with_settings(
        pretrained_model_root=str(tmp_path / "moved"),
        valid_video_csv=str(tmp_path / "other" / "prompts.csv"),
        reward_config='{"miniature_videoalign": {"batch_size": 8}}',
        validation_height=world.data.height,
        validation_shift=world.rollout.shift,
    )
    assert joint_identity(moved) == before
    named = {"path": str(tmp_path / "moved"), "batch_size": 8}
    assert (
        joint_identity(
            moved.with_settings(reward_config=json.dumps({"miniature_videoalign": named}))
        )
        == before
    )


def test_a_lora_that_runs_start_from_is_identified_by_its_bytes(world, tmp_path):
    for place, scale in (("a", 1.0), ("c", 2.0)):
        pair = LoraPair(torch.ones(1, 96), torch.ones(96, 1), scale)
        save_lora({"transformer_blocks.0.attn.to_q": pair}, tmp_path / place)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b, c = (
        joint_identity(world.with_settings(pretrained_lora_path=str(tmp_path / place)))
        for place in "abc"
    )
    assert a == b != c


@pytest.mark.parametrize(
    "part, change",
    [
        ("prompts", lambda root: (root / "prompts.csv").write_text(CSV.replace("blue", "red"))),
        ("prompts", lambda root: Image.new("RGB", (8, 8), "blue").save(root / "first.png")),
        ("scorers", lambda root: change_a_byte(root / "ckpts/VideoReward/checkpoint-1/model.pth")),
        (
            "base",
            lambda root: change_a_byte(
                next((root / "ckpts/transformer/miniature").glob("*.safetensors"))
            ),
        ),
        ("base", lambda root: shutil.rmtree(root / "ckpts/text_encoder")),
    ],
    ids=["csv", "image", "scorer", "transformer", "encoder"],
)
def test_a_changed_file_changes_the_identity(world, tmp_path, part, change):
    before = joint_identity(world)
    change(tmp_path)
    after = joint_identity(world)
    assert {name for name in before if before[name] != after[name]} == {part}


def test_other_csv_columns_and_model_versions_are_ignored(world, tmp_path):
    before = joint_identity(world)
    (tmp_path / "prompts.csv").write_text(
        CSV.replace("path\n", "path,note\n").replace("png\n", "png,seen\n")
    )
    (tmp_path / "ckpts/transformer/other").mkdir()
    (tmp_path / "ckpts/transformer/other/config.json").write_text("{}")
    assert joint_identity(world) == before


@pytest.mark.parametrize(
    "settings",
    [{"vae_tile_size": 64}, {"reward_weights": "averaged"}, {"validation_seed": 1}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_affect_videos_or_scores_change_the_identity(world, settings):
    assert joint_identity(world.with_settings(**settings)) != joint_identity(world)


def test_the_code_of_a_custom_scorer_is_part_of_the_identity(world, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("class Brightness: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "weights").write_text("1")
    for name in ("my_rewards:Brightness", f"{tmp_path}/my_rewards.py:Brightness"):
        options = json.dumps({name: {"path": str(tmp_path / "weights")}})
        config = world.with_settings(reward_model=[name], reward_config=options)
        before = joint_identity(config)
        for file in ("my_rewards.py", "weights"):
            (tmp_path / file).write_text((tmp_path / file).read_text() + "# more")
            assert joint_identity(config)["scorers"] != before["scorers"]
            before = joint_identity(config)


def test_a_checkpoint_is_identified_by_its_files_and_not_by_their_times(tmp_path):
    folder = tmp_path / "000010"
    (folder / "tensors").mkdir(parents=True)
    (folder / "tensors" / "a").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")
    (folder / DIGESTS).write_text(json.dumps(digest_files(folder)))
    before = policy_identity(checkpoint=folder)["checkpoint"]["files"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, copy_function=shutil.copy)
    assert policy_identity(checkpoint=copy)["checkpoint"]["files"] == before
    (copy / "tensors" / "a").write_bytes(b"Weights")
    assert policy_identity(checkpoint=copy)["checkpoint"]["files"] != before


@pytest.mark.system
def test_a_stored_evaluation_is_reused_until_something_changes(world, tmp_path, capsys):
    """Checked with the base model's evaluation of Table 2."""
    flags = {
        "pretrained_model_root": world.model.pretrained_model_root,
        "valid_video_csv": world.data.valid_video_csv[0],
        "validation_repeats": 1,
        "validation_steps": 1,
        "reward_model": "miniature",
    }
    (tmp_path / "prompts.csv").write_text(
        "prompt\na red circle moves up\na blue square moves left\n"
    )
    extra = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    study = RecipeStudy("configs/miniature.yaml", tmp_path / "out", extra=extra)

    def evaluated():
        evaluation, _ = evaluate_runs(study, [])
        return evaluation.videos, "evaluated base" in capsys.readouterr().out

    first, is_new = evaluated()
    assert is_new and evaluated() == (first, False)
    (tmp_path / "prompts.csv").write_text(
        "prompt\na red circle moves up\na green square moves left\n"
    )
    second, is_new = evaluated()
    seen = {"seen": True}  # recorded only if other prompts are not
    assert (
        is_new and second[0] | seen == first[0] | seen and second[1]["prompt"] != first[1]["prompt"]
    )
    assert evaluated() == (second, False)
    change_a_byte(next(Path(world.model.pretrained_model_root, "vae").glob("*.safetensors")))
    assert evaluated()[1] and not evaluated()[1]


def test_a_corrupted_stored_evaluation_is_ignored_with_a_message(tmp_path, capsys):
    videos = [
        {"group": group, "VQ": value, "missing": False} for group, value in enumerate((0.1, 0.3))
    ]
    path, evaluation = tmp_path / "scores.json", Evaluation(videos, {"frechet_distance": 2.0})
    write_evaluation(path, evaluation, {"checkpoint": "x"})
    assert read_evaluation(path, {"checkpoint": "x"}) == evaluation and not capsys.readouterr().err
    path.write_text('{"of": ')
    assert read_evaluation(path, {"checkpoint": "x"}) is None
    assert f"{path} is corrupted and ignored" in capsys.readouterr().err
