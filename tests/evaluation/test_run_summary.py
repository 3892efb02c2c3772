"""The attention kernel that a run prints at its start."""

import torch

from hyvideo.evaluation.run_summary import attention_kernel


def test_the_attention_kernel_is_reported(tiny_config):
    kernel = attention_kernel(tiny_config.model, 1, tiny_config.rollout_size, torch.device("cpu"))
    assert kernel == "aten::_scaled_dot_product_flash_attention_for_cpu"
