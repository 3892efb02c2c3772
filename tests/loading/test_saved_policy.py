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
from tests.conftest import small_config
from tests.shallow import SHALLOW, write_trained
from tests.test_trainer import Redness

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("shallow") / "ckpts")


def trained(root, folder, **settings):
    """Return the checkpoint of a run of one iteration."""
    config = small_config(folder).with_settings(
        pretrained_model_root=root,
        batch_size=2,
        num_generations=2,
        mini_batch_size_per_update=2,
        grpo_sampling_steps=2,
        max_steps=1,
        **settings,
    )
    Trainer(config, Mesh.single(), CPU, scorers={"test": Redness()}).train()
    return folder / "checkpoints" / "000001"


@pytest.fixture(scope="module")
def full(root, tmp_path_factory):
    """The checkpoint of a run that trains all weights."""
    return trained(root, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def of_lora(root, tmp_path_factory):
    """The checkpoint of a run that trains a LoRA."""
    return trained(root, tmp_path_factory.mktemp("lora"), lora_rank=2)


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
def test_evaluate_rejects_a_changed_tensor_file(full, tmp_path, exit_code, capsys):
    flags = ["--output_dir", tmp_path / "out", "--reward_model", "miniature"]
    flags += ["--valid_video_csv", "assets/miniature/prompts/smoke.csv"]
    restore = flip(tensor_file(full))
    try:
        assert exit_code(evaluate.main, "--checkpoint_path", full, *flags) == 2
    finally:
        restore()
    name = tensor_file(full).relative_to(full)
    assert (
        f"checkpoint {full} is corrupted: the contents of {name} have changed"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.system
def test_the_lora_of_a_checkpoint_is_verified_too(of_lora):
    (weights,) = (of_lora / "lora").glob("*.safetensors")
    for path in (of_lora, of_lora / "lora", weights):
        format.verify(path)
    assert saved_policy.read_saved_lora(of_lora / "lora")
    restore = flip(weights)
    format._verify_checkpoint.cache_clear()  # a process verifies a checkpoint once
    for path in (of_lora, of_lora / "lora", weights):
        with pytest.raises(ValueError, match="is corrupted: the contents of lora/.* have changed"):
            format.verify(path)
    restore()


def test_a_checkpoint_is_hashed_once(full, root, monkeypatch):
    read = []
    digest = format.digest_file
    monkeypatch.setattr(format, "digest_file", lambda path: read.append(path) or digest(path))
    format._verify_checkpoint.cache_clear()
    saved_policy.check_policy(root, "miniature", full)
    saved_policy.load(full, torch.float32)
    assert len(read) == len({*read}) == len(json.loads((full / DIGESTS).read_text()))


def test_folders_without_digests_are_read_and_checkpoints_are_not(full, tmp_path):
    format.verify(tmp_path)
    format.verify(tmp_path / "missing")
    saved_policy.check_policy(SHALLOW, "miniature", full)
    file = full / DIGESTS
    moved = file.rename(tmp_path / DIGESTS)
    format._verify_checkpoint.cache_clear()
    with pytest.raises(ValueError, match=DIGESTS):
        saved_policy.load_merged(
            SHALLOW, "miniature", checkpoint=full, lora=None, dtype=torch.float32
        )
    moved.rename(file)


def test_a_checkpoint_with_corrupted_digests_is_named(full, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/000001"
    shutil.copytree(full, checkpoint)
    (checkpoint / DIGESTS).write_text('{"state')
    assert contents.policy_identity(checkpoint=checkpoint) != contents.policy_identity(
        checkpoint=full
    )
    with pytest.raises(ValueError, match=f"{checkpoint} .*{DIGESTS}"):
        format.verify(checkpoint)
