"""What a run prints at its start."""

import torch

from hyvideo.config.run_plan import make_plan
from hyvideo.evaluation.run_summary import print_start


def test_the_start_names_the_kernel_that_attention_ran_on(tiny_config, capsys):
    print_start(
        tiny_config,
        make_plan(tiny_config, 1),
        about=[],
        world_size=1,
        device=torch.device("cpu"),
        num_trained_parameters=1,
        resumed_iteration=None,
        changed_settings=[],
    )
    assert "attention              aten::_scaled_dot_product_flash_attention_for_cpu\n" in capsys.readouterr().out
