"""Memory of generate.py by way of offloading, and the command that fits a GPU."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import generate
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.generation import fastest_way, generation_memory, ways
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import GIB
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config
from hyvideo.settings.offloading import Offloading
from scripts.plan import main

VIDEO = PlannedRun(
    Config()
    .with_settings(sample_n_frames=121, height=480, width=848, cfg_scale=6.0, shift=5.0)
    .resolved(),
    1,
    Architecture(),
)
PLAIN, STAGES, GROUPS = ways()


def on(gib):
    return replace(VIDEO, hardware=Hardware(gpu_memory=gib))


def phase_of(way, phase):
    return {
        name: size for name, size in generation_memory(VIDEO, way).phases[phase].items() if size
    }


def test_without_offloading_the_vae_and_the_transformer_stay_once_they_are_loaded():
    assert set(phase_of(PLAIN, "encode")) == {"encoders", "VAE"}
    assert set(phase_of(PLAIN, "sample")) == {"transformer", "VAE", "activations"}
    assert set(phase_of(PLAIN, "decode")) == {"transformer", "VAE", "decoding"}


def test_with_offloading_a_phase_holds_what_it_uses():
    assert set(phase_of(STAGES, "encode")) == {"encoders"}
    with_images = generation_memory(VIDEO.with_settings(transformer_version="480p_i2v"), STAGES)
    assert set(with_images.phases["encode"]) == {"encoders", "VAE"}
    assert set(phase_of(STAGES, "sample")) == {"transformer", "activations"}
    assert set(phase_of(STAGES, "decode")) == {"VAE", "decoding"}


def test_group_offloading_holds_two_or_four_blocks_of_the_transformer():
    model = VIDEO.architecture
    for overlap, blocks in ((True, 2), (False, 4)):
        held = phase_of(Offloading(True, True, overlap), "sample")["transformer"]
        assert held == 2 * (model.root_parameters + blocks * model.block_parameters)
    assert phase_of(GROUPS, "encode")["encoders"] < phase_of(STAGES, "encode")["encoders"] / 5


def test_the_fastest_way_that_fits_is_chosen_and_tiles_shrink_last():
    assert fastest_way(on(80)) == (on(80), PLAIN)
    assert fastest_way(on(24)) == (on(24), STAGES)
    run, way = fastest_way(on(10))
    assert way == GROUPS and run.settings.vae_tile_size == 128
    assert fastest_way(on(3)) is None


def test_a_video_of_121_frames_at_480p_needs_at_most_21_gib_on_a_gpu_of_24():
    assert generation_memory(*fastest_way(on(24))).needed_gib <= 21


@pytest.fixture
def plan(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])

    def run(*arguments):
        main(["--generate", *arguments])
        return capsys.readouterr().out

    return run


def test_the_plan_ends_with_a_command_that_generate_accepts_and_a_verdict(plan):
    printed = plan("--resolution", "480p", "--video_length", "121", "--gpu_memory", "24")
    *_, command, verdict = printed.splitlines()
    assert "121 frames of 480 x 848 = 49,290 video tokens" in printed
    assert verdict.startswith("fits: ") and verdict.endswith(
        "of 24 GiB, including CUDA context and fragmentation"
    )
    _, program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "generate.py")
    options = generate.parse([*words, "--prompt", "a cat"])
    assert (options.video_length, options.resolution) == (121, "480p")
    table = [line.split() for line in printed.splitlines() if line.startswith("sum")][0]
    assert max(map(float, table[1:])) == round(generation_memory(VIDEO, STAGES).peak() / GIB, 2)


def test_groups_without_overlap_are_planned_with_four_blocks(plan):
    held, words = [], ("--resolution", "480p", "--gpu_memory", "10")
    for flags in ((), ("--overlap_group_offloading", "false")):
        printed = plan(*words, *flags)
        [line] = [line for line in printed.splitlines() if line.startswith("transformer")]
        *_, command, verdict = printed.splitlines()
        held.append(float(line.split()[2]))
        assert (
            " ".join(flags) in command
            and "--group_offloading true" in command
            and verdict.startswith("fits: ")
        )
    assert held == [0.88, 1.44]


def test_a_gpu_that_is_too_small_gets_no_command(plan):
    printed = plan("--resolution", "480p", "--gpu_memory", "3")
    assert "command " not in printed and printed.splitlines()[-1].startswith("too large: ")


def test_the_sizes_of_a_version_are_planned(plan):
    assert "81 frames of 480 x 832" in plan(
        "--transformer_version", "wan2.1_t2v_1.3b", "--gpu_memory", "24"
    )
