"""The policy on its ranks: what it gives away of itself."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch

CPU = torch.device("cpu")
SETTINGS = {"reshard_after_forward": False, "dtype": "bf16", "lora_rank": 3, "enable_fsdp": True, "batch_size": 4}


def adapters(folder):
    """Whether the adapter is the same float32 numbers before and after a forward that leaves weights gathered."""
    from hyvideo.config.command_line import load_config
    from hyvideo.distributed import mesh as ranks
    from hyvideo.trainer import Trainer
    from tests.distributed.test_same_run import Choosy

    config = load_config("configs/smoke.yaml", output_dir=str(Path(folder)), valid_video_csv="", **SETTINGS)
    trainer = Trainer(config, ranks.start(1, CPU, timeout=60), CPU, scorers={"test": Choosy(-9.0)})
    before = trainer.policy.lora()
    collector, indices = trainer.collector, trainer.collector.indices()
    collector.sample(1, indices, trainer.encoder(collector.requests_of(1, indices)))
    after = trainer.policy.lora()
    return all(torch.equal(before[name].a, after[name].a) and after[name].a.dtype == torch.float32 for name in before)


@pytest.mark.slow
def test_an_adapter_is_given_away_in_full_precision_while_weights_are_gathered(tmp_path):
    assert launch("tests.training.test_policy:adapters", 2, str(tmp_path)) == [True, True]
