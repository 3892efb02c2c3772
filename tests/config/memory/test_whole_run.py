"""The length of a run: sums of what a rank computes, told as hours where a GPU's rate is known."""

from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.cost import cost, decode_flops, forward_flops, seconds, validation_seconds
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.whole_run import length_lines, num_validations, start_lines, whole_run

ROOT = Path(__file__).parents[3]
RELEASED = Architecture()


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(name="paper/table2_b_8gpu", world_size=8, **changes):
    return PlannedRun(load_config(f"configs/{name}.yaml", **changes), world_size, RELEASED)


def test_a_validation_on_one_gpu_is_its_videos_forwards_and_decoding():
    run = planned(world_size=1, sp_size=1)
    forward = forward_flops(RELEASED.image_tokens(121, 480, 864), 300, RELEASED).total
    decoded = decode_flops(planned(sample_n_frames=121, height=480, width=864))
    assert validation_seconds(run, 64, 400.0) == pytest.approx(64 * (40 * 2 * forward + decoded) / 400e12)


def test_replicas_share_the_videos_of_a_validation_and_the_fullest_is_waited_for():
    on = {gpus: validation_seconds(planned(world_size=gpus), 64, 400.0) for gpus in (8, 16, 64)}
    assert on[8] == pytest.approx(2 * on[16]) == pytest.approx(8 * on[64])
    assert validation_seconds(planned(), 61, 400.0) == on[8] > validation_seconds(planned(), 60, 400.0)


def test_ranks_that_share_a_batch_share_its_decoding():
    alone, pairs = (validation_seconds(planned(validation_batch_size=size), 64, 400.0) for size in (1, 2))
    decoded = decode_flops(planned().validation) / 400e12
    assert alone - pairs == pytest.approx(8 * decoded)  # 16 videos of a replica, 8 times two at once


@pytest.mark.parametrize("at_step0", [True, False])
@pytest.mark.parametrize("max_steps, interval", [(100, 10), (60, 20), (5, 10), (101, 10), (1, 1)])
def test_validations_are_those_that_the_trainer_makes(max_steps, interval, at_step0):
    record = planned(validation_interval=interval, validate_at_step0=at_step0).config.record
    due = [i for i in range(1, max_steps + 1) if i % interval == 0 or i == max_steps]
    assert num_validations(record, max_steps) == at_step0 + len(due)


def test_the_whole_run_is_its_iterations_and_its_validations():
    run = planned(validation_repeats=2)
    length = whole_run(run, 400.0)
    assert (length.iterations, length.validations, length.validation_videos) == (100, 11, 128)
    assert length.seconds == 100 * seconds(run, 400.0) + 11 * validation_seconds(run, 128, 400.0)
    assert length.gpu_hours == pytest.approx(8 * length.seconds / 3600)
    assert whole_run(run, 200.0).seconds == pytest.approx(2 * length.seconds)
    without = planned(valid_video_csv="")
    assert whole_run(without).validations == 0 and "validation" not in length_lines(without)[0]
    assert whole_run(without, 400.0).seconds == 100 * seconds(without, 400.0)


def test_hours_are_told_with_their_source():
    first, source = length_lines(planned(), label_width=23)
    assert first.startswith("whole run              100 iterations x 605 s + 11 validations of 64 videos x 2,312 s = ")
    assert first.endswith("= 23.9 h on 8 GPUs, 191 GPU-hours")
    assert "400 TFLOP/s a GPU (H100, H800), not measured" in source
    assert "300 TFLOP/s a GPU, not measured" in length_lines(planned(), rate=300.0)[1]


def test_a_run_of_more_than_a_week_is_warned_of_with_the_iterations_of_a_week():
    run = planned("hunyuanvideo15_480p_8gpu", valid_video_csv="")
    *_, warning = length_lines(run)
    assert "WARNING: longer than a week" in warning and "max_steps, now 10000" in warning
    in_a_week = int(warning.split("which is ")[1].split()[0].replace(",", ""))
    assert in_a_week * seconds(run, 400.0) <= 7 * 24 * 3600 < (in_a_week + 1) * seconds(run, 400.0)
    assert len(length_lines(run.with_settings(max_steps=in_a_week))) == 2


def test_a_cpu_and_the_miniature_get_forwards_and_no_hours():
    run = planned()
    [line] = length_lines(run, device="cpu")
    forwards = 100 * 32 * cost(run).forwards_per_rollout + 11 * 64 * 40 * 2
    assert f"= {forwards:,.0f} transformer forwards" in line and "GPU" not in line
    miniature = load_config("configs/miniature.yaml")
    for device in ("cpu", "cuda:0"):
        [line] = start_lines(miniature, 1, device)
        assert line.startswith("whole run              60 iterations of 32 rollouts + 4 validations of ")
        assert "GPU" not in line and "TFLOP" not in line


def test_a_start_takes_the_device_that_was_found():
    config = planned().config
    assert "GPU-hours" in start_lines(config, 8, "cuda:0")[0] == start_lines(config, 8, "auto")[0]
    assert "GPU-hours" not in start_lines(config, 8, "cpu")[0]


def test_a_transformer_that_is_not_there_has_no_length(tmp_path):
    config = planned(pretrained_model_root=str(tmp_path), transformer_version="mine").config
    assert start_lines(config, 8, "auto") == []


def test_a_validation_of_longer_videos_needs_more_memory_than_the_rollouts():
    with_validation, without = (memory(planned(**changes)) for changes in ({}, {"valid_video_csv": ""}))
    assert with_validation.peak_phase() == "validation" and "validation" not in without.phases
    decoding = (
        counted.phases[phase]["decoding"] for counted, phase in ((with_validation, "validation"), (without, "decode"))
    )
    larger, smaller = decoding
    assert larger / smaller == pytest.approx(121 / 81, rel=0.03)
    tiled = memory(planned(vae_tile_size=128)).phases["validation"]
    assert tiled["activations"] > 0 and "decoding" not in tiled
