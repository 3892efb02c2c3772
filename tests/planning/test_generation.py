"""Memory of generate.py by way of offloading."""

from pathlib import Path

import pytest

import generate
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.generation import PROCESS_GIB, WAYS, generation_memory, host_gib
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


def test_both_experts_and_the_host_are_counted():
    """Twice 14.29 B parameters in bf16 are 53.2 GiB; in fp8, 13.5 GiB each."""
    version = Config().with_settings(transformer_version="wan2.2_t2v_a14b").resolved()
    run = PlannedRun(version, 1, released_sizes("wan2.2_t2v_a14b"))

    def weights(run, way):
        return generation_memory(run, way).phases["sample"]["transformer"] / 2**30

    assert weights(run, PLAIN) == pytest.approx(53.2, rel=0.01)
    assert weights(run, STAGES) == pytest.approx(26.6, rel=0.01)
    assert 1 < weights(run, GROUPS) < 2
    for way in (STAGES, GROUPS):
        assert host_gib(run, way) == pytest.approx(53.2 + 0.2 + PROCESS_GIB, rel=0.02)
    assert host_gib(run, PLAIN) == PROCESS_GIB
    stored = run.with_settings(base_weight_dtype="fp8", partner_weight_dtype="fp8")
    assert weights(stored, PLAIN) == pytest.approx(27.0, rel=0.02)
    assert host_gib(stored, GROUPS) == pytest.approx(27.0 + 0.2 + PROCESS_GIB, rel=0.02)
    one = run.with_settings(partner_weight_dtype="fp8")
    assert weights(one, STAGES) == weights(run, STAGES)
    assert weights(one, PLAIN) == pytest.approx(26.6 + 13.5, rel=0.02)
