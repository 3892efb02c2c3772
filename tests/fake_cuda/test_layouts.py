"""Convolutions of the VAEs read channels-last tensors, so that cuDNN copies none of them."""

import pytest

from tests.fake_cuda.counting import counted

pytestmark = pytest.mark.system


def test_convolutions_copy_almost_no_inputs_with_and_without_gradient():
    """Of Wan, those of the first convolution and beside a doubling of the frames are copied."""
    shares = counted("tests.fake_cuda.layouts")
    assert max(shares["hunyuan, decode"], shares["hunyuan, gradient"]) == 0, shares
    assert max(shares["wan, decode"], shares["wan, gradient"]) < 0.03, shares
