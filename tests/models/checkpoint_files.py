"""Helpers that modify and compare files of the small checkpoint."""

import json

import torch
from safetensors.torch import load_file, save_file

VERSION = "480p_t2v"  # the version that the fixture writes
TENSOR = "double_blocks.1.img_mlp.fc1.weight"
FILE = "diffusion_pytorch_model.safetensors"


def transformer_file(root):
    return root / "transformer" / VERSION / FILE


def rewrite(path, change):
    """Apply `change` to the dictionary of tensors in a file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def rewrite_config(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_model(model, expected):
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
