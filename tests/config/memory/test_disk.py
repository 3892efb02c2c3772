"""Size of checkpoints and the check of the free disk space."""

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory import disk
from hyvideo.config.memory.disk import check_room, checkpoint_bytes, max_checkpoints
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.sizes import read_architecture
from hyvideo.trainer import Trainer
from tests.conftest import ROOT
from tests.test_trainer import CPU, Redness

GIB = 2**30


def planned(config=None, world_size=8, **settings):
    architecture = read_architecture(str(ROOT / "assets/miniature"), "miniature") if config else Architecture()
    config = config or load_config(str(ROOT / "configs/hunyuanvideo15_480p_8gpu.yaml"))
    return PlannedRun(config.with_settings(**settings), world_size, architecture)


@pytest.mark.parametrize(
    "settings, fraction", [({"lora_rank": 2, "use_muon": False}, 0.98), ({"ema_decay": 0.9, "use_muon": True}, 0.3)]
)
def test_the_predicted_size_bounds_the_saved_checkpoint(tiny_config, mesh, settings, fraction):
    """The miniature freezes most of its parameters, since its prompts have no glyphs or images."""
    config = tiny_config.with_settings(**settings, save_asynchronously=False)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    trainer.run_iteration()
    found = sum(tensor.nbytes for tensor in trainer.policy.tensors().values())
    bound = checkpoint_bytes(planned(config, 1))
    assert fraction * bound <= found <= 1.001 * bound  # counters


def test_the_size_does_not_depend_on_the_ranks_and_is_known_for_the_released_model():
    sizes = [
        checkpoint_bytes(planned(enable_fsdp=fsdp, world_size=ranks)) for fsdp in (True, False) for ranks in (8, 64)
    ]
    assert sizes == pytest.approx([sizes[0]] * 4)
    assert sizes[0] / GIB == pytest.approx(103.8, abs=0.1)


@pytest.mark.parametrize("limit, every, most", [(3, 0, 4), (3, 20, 9), (0, 0, 10), (20, 0, 10), (1, 0, 2), (0, 20, 10)])
def test_the_number_of_checkpoints_includes_the_one_being_written(limit, every, most):
    run = planned(max_steps=100, save_interval=10, save_total_limit=limit, keep_every=every)
    assert max_checkpoints(run) == most


def test_a_disk_without_room_for_one_raises_and_for_all_warns(tmp_path, monkeypatch, capsys):
    run = planned(output_dir=str(tmp_path))
    rule = "output_dir must have room for 4 more checkpoints of 103.8 GiB, got "
    for free, expected in ((100, None), (300, f"WARNING: {rule}"), (420, "")):
        monkeypatch.setattr(disk, "free_disk", lambda folder, free=free: free * GIB)
        if expected is None:
            with pytest.raises(ValueError, match=f"{rule}.* with 100.0 GiB free"):
                check_room(run)
            continue
        check_room(run)
        assert expected in (printed := capsys.readouterr().err) and bool(expected) == bool(printed)
    for number in (50, 100, 150):  # checkpoints of the run that is resumed
        (tmp_path / "checkpoints" / f"{number:06d}").mkdir(parents=True)
    monkeypatch.setattr(disk, "free_disk", lambda folder: 110 * GIB)
    check_room(run)
    assert capsys.readouterr().err == ""
