"""Rules that depend on the machine."""

import pytest
import torch

from hyvideo.loading.model_setup import choose_device


def test_every_process_needs_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="2 GPUs for process 3"):
        choose_device("auto", 2)
