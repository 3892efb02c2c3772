"""Tests of custom samplers from a file: equality with built-in ones, noise matching, and error
messages.
"""

import math

import pytest
import torch

from hyvideo.schedulers.noise_matching import matched_eta, total_variance
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import sampler_of, schedule, shifted_levels

LEVELS = shifted_levels(20, 5.0)
RUN = dict(num_steps=20, shift=5.0, last_step="stochastic")
CODE = """
import math
from hyvideo.schedulers.transitions import Sampler, Transition

def dance(sigma, sigma_next, eta, sigma_after_first):
    return eta**2 * (sigma - sigma_next)

def linear(sigma, sigma_next, eta, sigma_after_first):
    return eta * (sigma - sigma_next)

def falling(sigma, sigma_next, eta, sigma_after_first):
    return math.sin(eta * math.pi / 2) ** 2 * (sigma - sigma_next)

def constant(sigma, sigma_next, eta, sigma_after_first):
    return sigma - sigma_next

def jump(sigma, sigma_next, eta, sigma_after_first):
    return (eta > 0.3) * 1.0 + eta * (sigma - sigma_next)

def cps(sigma, sigma_next, eta, sigma_after_first):
    std = sigma_next * math.sin(eta * math.pi / 2)
    kept = math.sqrt(max(sigma_next**2 - std**2, 0.0))
    return Transition(a=(1 - sigma_next) + kept, b=-sigma * (1 - sigma_next) + (1 - sigma) * kept, std=std)

full = Sampler("Custom CPS", cps, max_eta=1.0, is_normalised=False)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a function from a name to FILE.py:NAME."""
    (tmp_path / "custom.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return lambda name: f"custom.py:{name}"


# --- noise matching ----------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.01, 3.0])
def test_a_variance_linear_in_eta_is_matched_at_its_closed_form(place, eta):
    """``V = eta d`` sums to eta, sage to ``eta^2 (log(1 / 0.003) - 1)``; a root would give 1.54,
    not 2.36.
    """
    expected = eta**2 * (math.log(1 / 0.003) - 1)
    assert matched_eta(f"sage_grpo:{eta}", place("linear"), **RUN) == pytest.approx(
        expected, rel=1e-12
    )
    assert matched_eta(f"{place('linear')}:{expected!r}", "sage_grpo", **RUN) == pytest.approx(
        eta, rel=1e-12
    )


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_bisection_finds_the_closed_form_of_built_in_samplers(sde_type):
    target = "sage_grpo:0.5"
    name, _, eta = target.partition(":")
    at_one = total_variance(sde_type, LEVELS, 1.0, "stochastic")
    share = total_variance(name, LEVELS, float(eta), "stochastic") / at_one
    expected = 2 / math.pi * math.asin(math.sqrt(share)) if sde_type == "cps" else math.sqrt(share)
    assert matched_eta(target, sde_type, **RUN) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name, target", [("falling", "dance_grpo:1.5"), ("constant", "dance_grpo:0.5")]
)
def test_noise_that_cannot_be_matched_raises_an_error(place, name, target):
    with pytest.raises(ValueError, match=f"custom.py:{name}"):
        matched_eta(target, place(name), **RUN)


def test_a_variance_that_falls_only_above_the_matched_eta_is_matched(place):
    # sin^2(pi / 6)
    assert matched_eta("dance_grpo:0.5", place("falling"), **RUN) == pytest.approx(1 / 3, rel=1e-12)


# --- sampling and replay -----------------------------------------------------------------------


def sample_and_replay(sde_type, eta):
    """Return latents and log-probabilities of a rollout, and the log-probabilities of its
    replay.
    """
    made, generator = (
        Schedule.build(sde_type, num_steps=20, shift=5.0, eta=eta),
        torch.Generator().manual_seed(0),
    )
    latent, found = torch.randn(2, 4, 3, generator=generator), []
    for index in range(20):
        velocity, noise = torch.randn(2, 2, 4, 3, generator=generator)
        step = made.step(velocity, latent, index, noise)
        again = made.replay(velocity, latent, [index] * 2, step.sample)
        found.append((step.sample, step.log_prob, again.log_prob))
        latent = step.sample
    return [torch.stack(column) for column in zip(*found)]


@pytest.mark.parametrize("name, built_in", [("dance", "dance_grpo"), ("full", "cps")])
def test_a_custom_sampler_equals_the_built_in_one_bit_for_bit(place, name, built_in):
    for custom, expected in zip(
        sample_and_replay(place(name), 0.4), sample_and_replay(built_in, 0.4), strict=True
    ):
        assert torch.equal(custom, expected)
    custom, expected = (
        Schedule.build(sde_type, num_steps=20, shift=5.0, eta=0.4)
        for sde_type in (place(name), built_in)
    )
    assert torch.equal(custom.equalizer_weights, expected.equalizer_weights)


def test_the_log_prob_is_normalized_unless_the_sampler_declares_otherwise(place):
    steps = schedule(place("cps"), LEVELS, 0.5, "stochastic")
    cps, full = sampler_of(place("cps")), sampler_of(place("full"))
    assert cps.log_prob_grad_norm(steps[3]) == pytest.approx(abs(steps[3].b) / steps[3].std)
    assert full.log_prob_grad_norm(steps[3]) == pytest.approx(2 * abs(steps[3].b) * steps[3].std)
    assert (cps.label, full.label, full.max_eta) == ("cps", "Custom CPS", 1.0)


def test_files_with_equal_names_in_different_folders_are_different_samplers(tmp_path, monkeypatch):
    for folder, factor in (("a", 1), ("b", 4)):
        code = f"def f(sigma, sigma_next, *_): return {factor} * (sigma - sigma_next)"
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "custom.py").write_text(code)
        monkeypatch.chdir(tmp_path / folder)
        assert total_variance("custom.py:f", LEVELS, 1.0, "stochastic") == pytest.approx(factor)


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent", "custom.py has no 'absent'"),
    ],
)
def test_an_invalid_sampler_raises_an_error(place, name, message):
    with pytest.raises(ValueError, match=message):
        sampler_of(place(name))
    assert sampler_of(place("linear")).label == "linear"


def test_a_file_that_fails_to_run_raises_an_error(tmp_path):
    (tmp_path / "custom.py").write_text("exit(0)")
    with pytest.raises(ValueError, match="custom.py"):
        sampler_of(f"{tmp_path}/custom.py:f")
    with pytest.raises(ValueError, match="nowhere.py"):
        sampler_of(f"{tmp_path}/nowhere.py:f")


@pytest.mark.parametrize(
    "body, step",
    [
        ("return float('nan')", 1),
        ("return Transition(1.0, float('inf'), 0.1)", 1),
        ("return (sigma - sigma_next) / sigma_next", 20),
        ("raise KeyError", 1),
    ],
)
def test_the_error_for_an_undefined_step_names_the_sampler_and_the_step(tmp_path, body, step):
    head = "from hyvideo.schedulers.transitions import Transition\n"
    (tmp_path / "custom.py").write_text(
        f"{head}def f(sigma, sigma_next, eta, sigma_after_first):\n    {body}\n"
    )
    with pytest.raises(ValueError, match=f"custom.py:f .* step {step} of 20"):
        schedule(f"{tmp_path}/custom.py:f", LEVELS, 0.5, "stochastic")


def test_eta_must_be_at_most_max_eta(place):
    with pytest.raises(ValueError, match="eta .* custom.py:full"):
        schedule(place("full"), LEVELS, 1.5, "stochastic")
    assert schedule(place("full"), LEVELS, 1.0, "stochastic")
