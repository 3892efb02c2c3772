"""Memory of generate.py by way of offloading."""

from pathlib import Path

import generate
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.generation import WAYS, generation_memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config

ROOT = Path(__file__).parents[2]
VIDEO = PlannedRun(
    Config()
    .with_settings(sample_n_frames=121, height=480, width=848, cfg_scale=6.0, shift=5.0)
    .resolved(),
    1,
    released_sizes("480p_t2v"),
)
PLAIN, STAGES, GROUPS = WAYS


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


def test_group_offloading_holds_two_blocks_of_the_transformer():
    model = VIDEO.parameters
    held = phase_of(GROUPS, "sample")["transformer"]
    assert held == 2 * (model.root + 2 * model.block)
    assert phase_of(GROUPS, "encode")["encoders"] < phase_of(STAGES, "encode")["encoders"] / 5


def test_generate_prints_the_memory_of_each_way_of_offloading(capsys, monkeypatch):
    words = ["--resolution", "480p", "--video_length", "121"]
    monkeypatch.chdir(ROOT)
    generate.run(generate.parse([*words, "--print_memory", "4090"]))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[-1] for line in printed] == ["too large", "fits", "fits"]
