"""Convolutions of the VAEs read channels-last tensors, so that cuDNN copies none of them."""

import pytest

from tests.fake_cuda.counting import counted

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def layouts():
    return counted("tests.fake_cuda.layouts")


@pytest.mark.parametrize(
    "vae, decode, gradient",
    [("hunyuan", 86, 470), ("wan", 51, 220), ("wan22", 50, 200)],
)
def test_a_decoding_stays_within_its_traffic_and_copies_almost_no_inputs(
    layouts, vae, decode, gradient
):
    """Traffic in GB of the memory-bound operators and convolutions. What is copied belongs to the
    first convolution and to those beside a doubling of the frames.
    """
    for part, gigabytes in (("decode", decode), ("gradient", gradient)):
        found = layouts[f"{vae}, {part}"]
        assert found["GB"] <= gigabytes, (part, found)
        assert found["copied"] <= 0.1, (part, found)
