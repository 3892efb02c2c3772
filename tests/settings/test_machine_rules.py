"""Rules that depend on the machine."""

import pytest
import torch

from hyvideo.settings.rules import check
from hyvideo.training.model_setup import choose_device


def test_a_checkpoint_to_resume_must_be_complete(tiny_config, tmp_path):
    for wanted in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=f"resume_from_checkpoint .*{wanted}"):
            check(tiny_config.with_settings(resume_from_checkpoint=str(wanted)))
    (tmp_path / "state.json").write_text("{}")
    check(tiny_config.with_settings(resume_from_checkpoint=str(tmp_path)))


def test_every_process_needs_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="2 GPUs for process 3"):
        choose_device("auto", 2)


@pytest.mark.parametrize("linked", [False, True])
def test_weights_that_the_run_would_remove_are_rejected(tiny_config, tmp_path, linked):
    """A checkpoint of the run is deleted by save_total_limit, and a restart could not read it."""
    checkpoint = tmp_path / "run/checkpoints/000002"
    checkpoint.mkdir(parents=True)
    given = tmp_path / "given" if linked else checkpoint
    if linked:
        given.symlink_to(checkpoint)
    rule = "anchor_path .* output_dir"
    config = tiny_config.with_settings(
        output_dir=str(tmp_path / "run"), kl_strategy="fixed", anchor_path=str(given)
    )
    with pytest.raises(ValueError, match=rule):
        check(config)
    check(config.with_settings(output_dir=str(tmp_path / "other")))
