"""A checkpoint that differs from its digests is rejected by every program that reads it."""

import json
import shutil

import pytest
import torch

from hyvideo.checkpoints import format
from hyvideo.checkpoints.format import DIGESTS
from hyvideo.distributed.mesh import Mesh
from hyvideo.loading import saved_policy
from hyvideo.trainer import Trainer
from hyvideo.validation import contents
from scripts import evaluate
from tests.shallow import SHALLOW, write_trained
from tests.test_trainer import Redness

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the checkpoints of a run that trains all weights, and of one that trains a LoRA."""
    from hyvideo.settings.command_line import load_config

    root, found = tmp_path_factory.mktemp("runs"), {}
    settings = {
        "pretrained_model_root": write_trained(root / "ckpts"),
        "valid_video_csv": "",
        "max_steps": 1,
    }
    settings |= {
        "log_video_interval": 0,
        "report": False,
        "report_to": ["none"],
        "num_updates_per_rollout": 1,
    }
    for name, more in (("full", {}), ("lora", {"lora_rank": 2})):
        config = load_config("configs/smoke.yaml", output_dir=str(root / name), **settings, **more)
        Trainer(config, Mesh.single(), CPU, scorers={"test": Redness()}).train()
        found[name] = root / name / "checkpoints" / "000001"
    return found


def flip(path):
    """Change one byte in the middle of a file and return a function that restores it."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[len(before) // 2] ^= 0x55
    path.write_bytes(changed)
    return lambda: path.write_bytes(before)


def tensor_file(checkpoint):
    return max((checkpoint / "tensors").glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.mark.system
def test_evaluate_rejects_a_changed_tensor_file(runs, tmp_path, exit_code, capsys):
    checkpoint = runs["full"]
    flags = ["--output_dir", tmp_path / "out", "--reward_model", "miniature"]
    flags += ["--valid_video_csv", "assets/miniature/prompts/smoke.csv"]
    restore = flip(tensor_file(checkpoint))
    try:
        assert exit_code(evaluate.main, "--checkpoint_path", checkpoint, *flags) == 2
    finally:
        restore()
    name = tensor_file(checkpoint).relative_to(checkpoint)
    assert (
        f"checkpoint {checkpoint} is corrupted: the contents of {name} have changed"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.system
def test_the_lora_of_a_checkpoint_is_verified_too(runs):
    checkpoint = runs["lora"]
    (weights,) = (checkpoint / "lora").glob("*.safetensors")
    for path in (checkpoint, checkpoint / "lora", weights):
        format.verify(path)
    assert saved_policy.read_saved_lora(checkpoint / "lora")
    restore = flip(weights)
    format._verify_checkpoint.cache_clear()  # a process verifies a checkpoint once
    for path in (checkpoint, checkpoint / "lora", weights):
        with pytest.raises(ValueError, match="is corrupted: the contents of lora/.* have changed"):
            format.verify(path)
    restore()


def test_a_checkpoint_is_hashed_once(runs, monkeypatch):
    read = []
    digest = format.digest_file
    monkeypatch.setattr(format, "digest_file", lambda path: read.append(path) or digest(path))
    format._verify_checkpoint.cache_clear()
    saved_policy.check_policy(runs["full"].parents[2] / "ckpts", "miniature", runs["full"])
    saved_policy.load(runs["full"], torch.float32)
    assert len(read) == len({*read}) == len(json.loads((runs["full"] / DIGESTS).read_text()))


def test_folders_without_digests_are_read_and_checkpoints_are_not(runs, tmp_path):
    format.verify(tmp_path)
    format.verify(tmp_path / "missing")
    saved_policy.check_policy(SHALLOW, "miniature", runs["full"])
    file = runs["full"] / DIGESTS
    moved = file.rename(tmp_path / DIGESTS)
    format._verify_checkpoint.cache_clear()
    with pytest.raises(ValueError, match=DIGESTS):
        saved_policy.load_merged(
            SHALLOW, "miniature", checkpoint=runs["full"], lora=None, dtype=torch.float32
        )
    moved.rename(file)


def test_a_checkpoint_with_corrupted_digests_is_named(runs, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/000001"
    shutil.copytree(runs["full"], checkpoint)
    (checkpoint / DIGESTS).write_text('{"state')
    assert contents.policy_identity(checkpoint=checkpoint) != contents.policy_identity(
        checkpoint=runs["full"]
    )
    with pytest.raises(ValueError, match=f"{checkpoint} .*{DIGESTS}"):
        format.verify(checkpoint)
