"""Size of checkpoints and the check of the free disk space."""

import pytest

from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning import disk
from hyvideo.planning.disk import check_room, checkpoint_bytes, disk_bytes, max_checkpoints
from hyvideo.planning.hours import iteration_seconds
from hyvideo.planning.persistent import trained_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from tests.conftest import ROOT
from tests.test_trainer import CPU, Redness

GIB = 2**30


def planned(config=None, world_size=8, **settings):
    architecture = (
        read_architecture(config.model.pretrained_model_root, config.model.transformer_version)
        if config
        else released_sizes("480p_t2v")
    )
    config = config or load_config(str(ROOT / "configs/hunyuanvideo15_480p_8gpu.yaml"))
    return PlannedRun(config.with_settings(**settings), world_size, architecture)


@pytest.mark.system
@pytest.mark.parametrize(
    "settings",
    [{"lora_rank": 2, "optimizer": "adamw"}, {"ema_decay": 0.9, "optimizer": "muon"}],
)
def test_the_predicted_size_is_that_of_the_saved_checkpoint(tiny_config, mesh, settings):
    """Most parameters of the miniature are frozen, since its prompts have no glyphs or images: they
    are saved, but have no anchor, average or moments.
    """
    config = tiny_config.with_settings(**settings, save_asynchronously=False)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    trainer.run_iteration()
    policy, run = trainer.run.policy, planned(config, 1)
    sizes = {name: tensor.nbytes for name, tensor in policy.tensors().items()}
    weights = sum(size for name, size in sizes.items() if name.startswith("policy."))
    assert weights == trained_bytes(run)
    trained = sum(parameter.nbytes for parameter in policy.parameters) / weights
    predicted = trained * (checkpoint_bytes(run) - weights)
    # less where Muon has one moment, more for the counters of steps
    assert 0.9 * predicted <= sum(sizes.values()) - weights <= 1.002 * predicted


def test_the_size_does_not_depend_on_the_ranks_and_is_known_for_the_released_model():
    sizes = [
        checkpoint_bytes(planned(enable_fsdp=fsdp, world_size=ranks))
        for fsdp in (True, False)
        for ranks in (8, 64)
    ]
    assert sizes == pytest.approx([sizes[0]] * 4)
    assert sizes[0] / GIB == pytest.approx(103.8, abs=0.1)


@pytest.mark.parametrize("limit, most", [(3, 4), (0, 10)])
def test_the_number_of_checkpoints_includes_the_one_being_written(limit, most):
    run = planned(max_steps=100, save_interval=10, save_total_limit=limit, save_minutes=0)
    assert max_checkpoints(run) == most


def test_saves_by_the_clock_count_until_the_limit():
    """An iteration takes 119 s, so that a run of 40 iterations saves at its end and, by the clock,
    at most twice.
    """
    by_clock = planned(max_steps=40, save_interval=50, save_minutes=60, save_total_limit=0)
    assert 3600 < 40 * iteration_seconds(by_clock) < 7200
    assert max_checkpoints(by_clock) == 3
    assert max_checkpoints(by_clock.with_settings(save_total_limit=1)) == 2
    assert max_checkpoints(by_clock.with_settings(save_minutes=0)) == 1


def test_the_disk_space_is_that_of_checkpoints_prompts_videos_and_logs():
    """300 iterations with 4 videos in every tenth, 7 validations of 4 videos, 256 + 32 prompts."""
    sizes = disk_bytes(planned())
    assert sizes["checkpoints"] == 4 * checkpoint_bytes(planned())
    assert sizes["encoded prompts"] == (256 + 32) * 300 * 3584 * 2
    videos = (30 + 7) * 4 * 81 * 352 * 624 / 32  # a quarter of a bit per pixel
    assert sizes["videos and logs"] == pytest.approx(videos + 300 * 2e4 + 1e7)
    assert "encoded prompts" not in disk_bytes(planned(precompute_conditions=False))
    assert "encoded prompts" not in disk_bytes(planned(conditions_dir="elsewhere"))
    without = disk_bytes(planned(log_video_interval=0, valid_video_csv=[]))
    assert without["videos and logs"] == pytest.approx(300 * 2e4 + 1e7)


def test_a_disk_without_room_for_one_raises_and_for_all_warns(tmp_path, monkeypatch, capsys):
    run = planned(output_dir=str(tmp_path))
    monkeypatch.setattr(disk, "free_disk", lambda folder: 100 * GIB)
    with pytest.raises(ValueError, match="output_dir .*save_total_limit"):
        check_room(run)
    monkeypatch.setattr(disk, "free_disk", lambda folder: 300 * GIB)
    check_room(run)
    assert "WARNING: output_dir" in capsys.readouterr().err
    monkeypatch.setattr(disk, "free_disk", lambda folder: 420 * GIB)
    check_room(run)
    assert capsys.readouterr().err == ""
    for number in (50, 100, 150):  # checkpoints of the run that is resumed
        (tmp_path / "checkpoints" / f"{number:06d}").mkdir(parents=True)
    monkeypatch.setattr(disk, "free_disk", lambda folder: 110 * GIB)
    check_room(run)
    assert capsys.readouterr().err == ""
