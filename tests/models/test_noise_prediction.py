"""The velocity of a model that predicts the noise, against closed forms."""

import pytest
import torch

from hyvideo.models.noise_prediction import signal_and_noise, velocity_from_noise


@pytest.fixture
def noise():
    return torch.randn(4, 1, 2, 3, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def data():
    return 3 + 2 * torch.randn(4, 1, 2, 3, 5, generator=torch.Generator().manual_seed(1))


def test_signal_and_noise_are_those_of_sigma_and_their_squares_sum_to_one():
    sigma = torch.tensor([0.01, 0.3, 0.5, 0.9])
    signal, noise_scale = signal_and_noise(1000 * sigma)
    torch.testing.assert_close(noise_scale / (signal + noise_scale), sigma)
    torch.testing.assert_close(signal**2 + noise_scale**2, torch.ones(4))


def test_the_true_noise_gives_the_true_velocity(data, noise):
    sigma = torch.tensor([0.02, 0.3, 0.6, 0.94])
    latents = data + sigma.view(-1, 1, 1, 1, 1) * (noise - data)
    seen = []

    def predict_noise(noisy, signal, noise_scale):
        signal, noise_scale = (each.view(-1, 1, 1, 1, 1) for each in (signal, noise_scale))
        seen.append((noisy, signal * data + noise_scale * noise))
        return noise

    velocity = velocity_from_noise(predict_noise, latents, 1000 * sigma)
    torch.testing.assert_close(velocity, noise - data, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(*seen[0])


def test_an_error_of_the_model_is_not_divided_by_less_than_the_smallest_signal(noise):
    """Sampling begins at sigma 1, where the noise says nothing about the data."""
    timesteps = torch.full((4,), 1000.0)

    def change(least_signal):
        right = velocity_from_noise(lambda *_: noise, noise, timesteps, least_signal=least_signal)
        wrong = velocity_from_noise(
            lambda *_: noise + 0.01, noise, timesteps, least_signal=least_signal
        )
        return (wrong - right).abs().max().item()

    for least_signal in (0.05, 0.2):
        grown = 0.01 * (1 + (1 - least_signal**2) ** 0.5 / least_signal)
        assert change(least_signal) == pytest.approx(grown, rel=1e-3)
