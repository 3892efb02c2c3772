"""A small checkpoint in the original layout; tests/golden has the original programs' outputs for
it.
"""

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
VERSION = "480p_t2v"


def seeded_normal(name, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def transformer_weight(name, shape):
    weight = seeded_normal(name, *shape)
    if len(shape) >= 2:
        return weight / weight[0].numel() ** 0.5
    return 0.3 * weight + (1.0 if name.endswith("weight") else 0.0)


def vae_weight(name, shape):
    weight = seeded_normal(name, *shape)
    if name.endswith("gamma"):
        return 1 + 0.2 * weight
    return weight / weight[0].numel() ** 0.5 if len(shape) >= 2 else 0.1 * weight


def golden_state(file, draw):
    """Return config and state dict of a golden model, with the original's names."""
    golden = json.loads((GOLDEN / file).read_text())
    return golden["config"], {
        name: draw(name, tuple(shape)) for name, shape in golden["parameters"].items()
    }


def write_model(folder, config, state):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


def write_text_encoder(folder):
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, Qwen2Tokenizer

    words = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2_5_VLTextModel(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def original_transformer():
    return golden_state("transformer.json", transformer_weight)


@pytest.fixture(scope="session")
def original_vae():
    return golden_state("vae.json", vae_weight)


@pytest.fixture(scope="session")
def root(tmp_path_factory, original_transformer, original_vae):
    """A complete folder in the original layout. Read-only."""
    root = tmp_path_factory.mktemp("ckpts")
    write_model(root / "transformer" / VERSION, *original_transformer)
    write_model(root / "vae", *original_vae)
    write_text_encoder(root / "text_encoder" / "llm")
    return root


@pytest.fixture
def root_copy(root, tmp_path):
    """A copy of the folder for tests that modify it."""
    return shutil.copytree(root, tmp_path / "ckpts")


@pytest.fixture
def transformer(root):
    from hyvideo.models.loading import load_transformer

    return load_transformer(root, VERSION)


@pytest.fixture
def golden_video():
    """The input video of the golden VAE outputs. Shape: (1, channels, frames, height, width)."""
    return seeded_normal("clip17", 1, 3, 17, 64, 96).clamp(-1, 1)


@pytest.fixture
def golden_inputs():
    """Padded inputs of a golden case, as keyword arguments of diffusers' forward pass."""

    def inputs(case, lengths, byt5_lengths):
        batch = len(lengths)
        conditions = torch.zeros(batch, 5, 3, 4, 5)
        image_embeds = torch.zeros(batch, 6, 20)
        if case.startswith("i2v"):
            conditions[:, :4, 0] = seeded_normal(f"{case}/image_latents", batch, 4, 4, 5)
            conditions[:, 4, 0] = 1
            image_embeds = seeded_normal(f"{case}/image_embeds", batch, 6, 20)
        return {
            "hidden_states": torch.cat(
                [seeded_normal(f"{case}/latents", batch, 4, 3, 4, 5), conditions], dim=1
            ),
            "timestep": torch.tensor([991.7355, 412.25])[:batch],
            "encoder_hidden_states": seeded_normal(f"{case}/text", batch, 20, 24),
            "encoder_attention_mask": (torch.arange(20) < torch.tensor(lengths)[:, None]).float(),
            "encoder_hidden_states_2": seeded_normal(f"{case}/byt5", batch, 12, 1472),
            "encoder_attention_mask_2": (
                torch.arange(12) < torch.tensor(byt5_lengths)[:, None]
            ).float(),
            "image_embeds": image_embeds,
        }

    return inputs
