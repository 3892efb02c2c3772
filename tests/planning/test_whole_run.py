"""Length of a run: the time of a rank, printed in hours if the rate of the GPU is known."""

from pathlib import Path

import pytest

from hyvideo.data.text import lines_of
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.cost import (
    COMPILATION,
    duration,
    forward_rate,
    forwards_per_rollout,
    validation_seconds,
    video_seconds,
)
from hyvideo.planning.disk import num_saves, rank_checkpoint_bytes
from hyvideo.planning.hardware import Hardware, hardware_of_device
from hyvideo.planning.length_text import length_rows, start_lines
from hyvideo.planning.memory import memory
from hyvideo.planning.planned_run import PlannedRun, num_validations
from hyvideo.planning.whole_run import whole_run
from hyvideo.settings.command_line import load_config
from hyvideo.settings.run_inputs import RunInputs

ROOT = Path(__file__).parents[2]
RELEASED = Architecture()


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(name="paper/table2_b_8gpu", world_size=8, hardware=None, **changes):
    config = load_config(f"configs/{name}.yaml", **changes)
    return PlannedRun(config, world_size, RELEASED, hardware=hardware or Hardware())


def length_lines(run):
    return lines_of(length_rows(run))


def seconds(run):
    return duration(run).total


def test_the_time_of_a_validation_on_one_gpu_is_sampling_and_decoding():
    run = planned(world_size=1, sp_size=1)
    forward = RELEASED.forward(RELEASED.image_tokens(121, 480, 864), 300).total
    per_video = 40 * 2 * forward / forward_rate(run.validation) + sum(video_seconds(run.validation))
    assert validation_seconds(run, 64) == pytest.approx(64 * per_video)


def test_replicas_share_validation_videos_and_the_largest_share_counts():
    on = {gpus: validation_seconds(planned(world_size=gpus), 64) for gpus in (8, 16, 64)}
    assert on[8] == pytest.approx(2 * on[16]) == pytest.approx(8 * on[64])
    assert validation_seconds(planned(), 57) == on[8] > validation_seconds(planned(), 56)


def test_a_validation_waits_for_weights_that_come_over_a_slow_network():
    fast, slow = (
        planned(world_size=64, hardware=Hardware(network=network), dp_replicate=8)
        for network in (50.0, 0.1)
    )
    sharded = slow.with_settings(dp_replicate=1)
    assert (
        validation_seconds(fast, 64)
        == validation_seconds(slow, 64)
        < validation_seconds(sharded, 64)
    )


def test_ranks_that_share_a_batch_share_its_decoding():
    alone, pairs = (
        validation_seconds(planned(sp_size=2, validation_batch_size=size), 64) for size in (1, 2)
    )
    per_video = sum(video_seconds(planned().validation))
    # a replica decodes its 16 videos in 8 pairs
    assert alone - pairs == pytest.approx(8 * per_video)


def test_a_validation_may_have_fewer_steps_than_the_window_needs():
    short = {"validation_steps": 4, "valid_video_csv": ["assets/miniature/prompts/smoke.csv"]}
    plain, windowed = (
        whole_run(planned(**short, sde_window=window)) for window in ("", "fixed:8:2")
    )
    assert windowed.validation_seconds == plain.validation_seconds > 0


@pytest.mark.parametrize("at_step0", [True, False])
@pytest.mark.parametrize("max_steps, interval", [(100, 10), (60, 20), (5, 10), (101, 10), (1, 1)])
def test_the_number_of_validations_matches_the_trainer(max_steps, interval, at_step0):
    record = planned(validation_interval=interval, validate_at_step0=at_step0).config.record
    due = [i for i in range(1, max_steps + 1) if i % interval == 0 or i == max_steps]
    assert num_validations(record, max_steps) == at_step0 + len(due)


def test_the_whole_run_is_the_sum_of_iterations_and_validations():
    run = planned(validation_repeats=2)
    length = whole_run(run)
    assert (length.iterations, length.validations, length.validation_videos) == (100, 11, 128)
    assert (length.saves, length.save_seconds) == (num_saves(run), rank_checkpoint_bytes(run) / 3e9)
    saving = length.saves * length.save_seconds
    assert length.seconds == pytest.approx(
        100 * seconds(run) + 11 * validation_seconds(run, 128) + saving + COMPILATION
    )
    assert whole_run(planned(enable_compile=False)).compilation_seconds == 0
    assert length.gpu_hours == pytest.approx(8 * length.seconds / 3600)
    without = planned(valid_video_csv="")
    assert whole_run(without).validations == 0 and "validation" not in length_lines(without)[0]
    alone = whole_run(without)
    assert alone.seconds == 100 * seconds(without) + alone.saves * alone.save_seconds + COMPILATION


def test_validation_guidance_uses_its_scale_and_the_interval():
    guided, unguided = (
        whole_run(planned(cfg_scale=1.0, validation_cfg_scale=scale)) for scale in (2.0, None)
    )
    assert guided.forwards - unguided.forwards == 11 * 64 * 40
    assert guided.validation_seconds > unguided.validation_seconds
    assert guided.iteration_seconds == unguided.iteration_seconds
    inside = whole_run(planned(cfg_scale=1.0, validation_cfg_scale=2.0, guidance_interval="0.5:1"))
    assert unguided.forwards < inside.forwards < guided.forwards


def test_hours_are_printed_with_their_assumptions():
    first, source, *_ = length_lines(planned())
    assert first.startswith(
        "whole run              100 iterations x 501 s + 11 validations x 1,723 s (64 videos each) "
        "+ 16 "
    )
    assert first.endswith(
        "checkpoints x 4 s + 270 s of compilation = 19.3 h on 8 GPUs, 154 GPU-hours; 47.5 h at 220 "
        "TFLOP/s (A100)"
    )
    assert (
        "580 TFLOP/s per GPU in matrix products (H100), 2.6 TB/s of its memory, 300 GB/s within a "
        "node and 50 GB/s per GPU between nodes; 0.0% exposed comm" in source
    )
    assert (
        "300 TFLOP/s per GPU in matrix products, 1.3 TB/s of its memory, 300"
        in length_lines(planned(hardware=Hardware(rate=300.0)))[1]
    )


def test_a_run_longer_than_a_week_warns_with_the_iterations_of_a_week():
    run = planned("hunyuanvideo15_480p_8gpu", valid_video_csv="", max_steps=10_000)
    _, _, warning, *_ = length_lines(run)
    assert "WARNING: longer than a week" in warning and "max_steps (now 10000)" in warning
    in_a_week = int(warning.split("a week is ")[1].split()[0].replace(",", ""))
    assert whole_run(run.with_settings(max_steps=in_a_week)).seconds == pytest.approx(
        7 * 24 * 3600, rel=1e-3
    )
    assert "WARNING" not in "".join(
        length_lines(run.with_settings(max_steps=int(0.999 * in_a_week)))
    )


def test_the_share_of_validation_is_printed_and_a_large_one_warns():
    paper, recipe = planned(), planned("hunyuanvideo15_480p_8gpu")
    for run, share, size in (
        (paper, 27, "121 frames of 480 x 864"),
        (recipe, 6, "81 frames of 352 x 624"),
    ):
        length = whole_run(run)
        found = length.validations * length.validation_seconds / length.seconds
        assert found == length.validation_share and round(100 * found) == share
        lines = length_lines(run)
        (number,) = [number for number, line in enumerate(lines) if line.startswith("validation  ")]
        assert lines[number] == f"validation             {share} % of the run: 40 steps for {size}"
        assert ("WARNING: above 20 %; raise validation_interval" in lines[number + 1]) == (
            share > 20
        )
    without = length_lines(planned(valid_video_csv=""))
    assert not any(line.startswith("validation") or "above 20 %" in line for line in without)


def test_the_disk_space_of_the_whole_run_is_printed():
    assert length_lines(planned())[-1] == (
        "disk                   373 GiB in output_dir: checkpoints 372, encoded prompts 0.6, "
        "videos and logs 0.1"
    )


def test_the_loss_in_a_crash_is_reported_above_one_hour():
    name = "hunyuanvideo15_480p_8gpu"
    line = length_lines(planned(name, save_minutes=0))[-3]
    assert line.startswith(
        "checkpoints            103.8 GiB each, at most 4: 415 GiB; a crash loses up to"
    )
    assert line.endswith("(1 h + 1 iteration with --save_minutes 60)")
    for settings in ({"save_minutes": 30}, {"save_minutes": 0, "save_interval": 1}):
        assert length_lines(planned(name, **settings))[-3].endswith("415 GiB")


def test_a_cpu_run_and_the_miniature_print_forward_passes_instead_of_hours():
    run = planned(device="cpu")
    [line] = length_lines(run)
    forwards = 100 * 32 * forwards_per_rollout(run) + 11 * 64 * 40 * 2
    assert f"= {forwards:,.0f} forward passes, duration unknown" in line and "GPU" not in line
    miniature = load_config("configs/miniature.yaml")
    for device in ("cpu", "cuda"):
        [evaluations, line] = start_lines(RunInputs(miniature, 1), device)
        assert evaluations.startswith("cost per rollout       ")
        assert line.endswith("= 26,112 forward passes, about 2 minutes on two idle CPU cores")
        assert line.startswith(
            "whole run              30 iterations of 32 rollouts + 4 validations (96 videos each) "
            "= "
        )
        assert "GPU" not in line and "TFLOP" not in line


def test_start_lines_depend_on_the_device():
    inputs = RunInputs(planned().config, 8)
    on_gpu = start_lines(inputs, "cuda")
    on_cpu = start_lines(inputs, "cpu")
    assert on_gpu == start_lines(inputs, "auto") and "GPU-hours" in "".join(on_gpu)
    assert len(on_cpu) == 2


def test_start_lines_report_checkpointing_and_its_memory():
    config, run = planned().config, planned()
    kinds = ("selective", "full")
    needed = {
        kind: memory(run.with_settings(activation_checkpointing=kind)).needed_gib for kind in kinds
    }
    assert start_lines(RunInputs(config, 8), "cuda")[1] == (
        f"recomputation          selective: {needed['selective']:.1f} of 79.1 GiB"
    )
    assert start_lines(RunInputs(config, 8), "cuda", Hardware(gpu_memory=30.0))[1] == (
        f"recomputation          full: {needed['full']:.1f} of 30 GiB; selective is faster but "
        f"needs {needed['selective']:.1f} GiB"
    )
    without = config.with_settings(enable_gradient_checkpointing=False)
    assert not any("recomputation" in line for line in start_lines(RunInputs(without, 8), "cuda"))


def test_a_missing_transformer_has_no_start_lines(tmp_path):
    config = planned(pretrained_model_root=str(tmp_path), transformer_version="mine").config
    assert start_lines(RunInputs(config, 8), "auto") == []


def test_a_validation_of_longer_videos_needs_more_memory_than_the_rollouts():
    full = {"activation_checkpointing": "full"}
    with_validation, without = (
        memory(planned(**full, **changes)) for changes in ({}, {"valid_video_csv": ""})
    )
    assert (
        with_validation.total("validation") > without.total("decode")
        and "validation" not in without.phases
    )
    decoding = (
        counted.phases[phase]["decoding"]
        for counted, phase in ((with_validation, "validation"), (without, "decode"))
    )
    larger, smaller = decoding
    assert larger / smaller == pytest.approx(121 / 81, rel=0.06)
    tiled = memory(
        planned(vae_tile_size=128, batched_forward=True, validation_batch_size=4)
    ).phases["validation"]
    assert tiled["activations"] > 0 and "decoding" not in tiled


def test_host_memory_of_a_node_is_printed_with_the_copy_of_a_checkpoint():
    def line(name, world_size, **changes):
        found = [
            line
            for line in length_lines(planned(name, world_size, **changes))
            if line.startswith("host memory")
        ]
        return found[0].removeprefix("host memory            ")

    sage, nft = "hunyuanvideo15_480p_8gpu", "hunyuanvideo15_480p_8gpu_nft"
    assert (
        line(sage, 8)
        == "anchor 31 GiB per node, pinned; 104 GiB on the node while a checkpoint is written"
    )
    assert line(sage, 16).endswith(
        "GiB per node, pinned; 52 GiB on each node while a checkpoint is written"
    )
    assert line(nft, 8) == "124 GiB on the node while a checkpoint is written"
    both = line(nft, 8, ema_decay=0.9, reference_mode_offload=True)
    assert both.startswith("anchor 31, EMA 31 GiB per node, pinned; ")


def test_the_plan_says_that_more_gpus_do_not_shorten_a_run():
    def lines(world_size, **changes):
        run = planned("hunyuanvideo15_480p_8gpu", world_size, **changes)
        return [line for line in length_lines(run) if line.startswith("more GPUs")]

    assert lines(8) == [
        "more GPUs              more rollouts per iteration (8 on 8), not a shorter run: that "
        "needs a lower max_steps"
    ]
    assert lines(8, sp_size=8) == []


def test_the_length_at_the_start_of_a_run_is_that_of_its_gpu():
    inputs = RunInputs(planned().config, 8)
    on = {
        name: start_lines(inputs, "cuda", hardware_of_device(name, 79.1))
        for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H20", "")
    }
    assert "220 TFLOP/s per GPU in matrix products (A100)" in "".join(on["NVIDIA A100-SXM4-80GB"])
    assert on["NVIDIA H20"] == on[""] and "(H100)" in "".join(on[""])
