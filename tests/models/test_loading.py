import subprocess
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file

from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.loading import (
    load_transformer,
    load_transformer_weights,
    load_vae,
    stream_transformer,
)
from hyvideo.models.saving import save_original
from hyvideo.weights.weight_files import draw_tensor
from tests.forked import python
from tests.models.checkpoint_files import (
    FILE,
    TENSOR,
    VERSION,
    assert_same_model,
    rewrite,
    rewrite_config,
    transformer_file,
)

GOLDEN = Path(__file__).parents[1] / "golden"


# --- transformer ------------------------------------------------------------------------------


def test_both_layouts_and_a_single_folder_give_the_same_transformer(transformer, tmp_path):
    transformer.save_pretrained(tmp_path / "transformer", max_shard_size="10MB")
    assert_same_model(load_transformer(tmp_path, VERSION), transformer)
    assert_same_model(load_transformer(tmp_path / "transformer", None), transformer)
    assert (
        tuple(load_transformer(tmp_path, None).config.rope_axes_dim)
        == transformer.config.rope_axes_dim
    )


@pytest.mark.parametrize("seed", [None, 3])
def test_a_rank_that_receives_the_weights_reads_none(root, seed):
    streams = [
        stream_transformer(root, VERSION, read=read, random_weights_seed=seed)[1]
        for read in (True, False)
    ]
    for (name, tensor), (same, meta) in zip(*streams, strict=True):
        assert (name, tensor.shape) == (same, meta.shape) and meta.is_meta and not tensor.is_meta


def test_a_loaded_model_does_not_depend_on_its_file(root_copy):
    transformer = load_transformer(root_copy, VERSION)
    before = transformer.proj_out.weight.clone()
    size = transformer_file(root_copy).stat().st_size
    with transformer_file(root_copy).open("r+b") as file:
        file.write(b"\0" * size)
    assert torch.equal(transformer.proj_out.weight, before)


def test_loading_keeps_the_random_state(root):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load_transformer(root, VERSION, random_weights_seed=0)
    load_vae(root, random_weights_seed=0)
    load_text_encoder(root, random_weights_seed=0)
    assert torch.equal(torch.get_rng_state(), before)


# --- files that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(TENSOR),
        lambda tensors: tensors.update({TENSOR: torch.zeros(256, 63)}),
        lambda tensors: tensors.update({TENSOR: tensors[TENSOR].to(torch.float8_e4m3fn)}),
    ],
    ids=["missing", "misshapen", "eight bits"],
)
def test_a_tensor_that_does_not_fit_is_an_error_that_names_tensor_and_file(root_copy, change):
    load_transformer(root_copy, VERSION)
    rewrite(transformer_file(root_copy), change)
    with pytest.raises(ValueError, match=TENSOR) as error:
        load_transformer(root_copy, VERSION)
    assert FILE in str(error.value)


def test_a_file_that_is_not_whole_is_an_error_that_names_it(root_copy):
    path = transformer_file(root_copy)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=FILE):
        load_transformer(root_copy, VERSION)


def test_a_missing_shard_raises_an_error(transformer, tmp_path):
    transformer.save_pretrained(tmp_path, max_shard_size="10MB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load_transformer(tmp_path, None)


def test_a_misspelled_key_of_a_diffusers_config_raises_an_error(transformer, tmp_path):
    transformer.save_pretrained(tmp_path)
    rewrite_config(tmp_path / "config.json", num_layer=3)
    with pytest.raises(ValueError, match="num_layer"):
        load_transformer(tmp_path, None)


# --- random weights ---------------------------------------------------------------------------


def test_random_weights_never_change():
    drawn = draw_tensor(7, "byt5_in.fc1.weight", (2, 3))
    assert drawn.dtype == torch.float32
    assert drawn.flatten().tolist() == [
        -0.9862674474716187,
        0.4907204210758209,
        0.36618345975875854,
        -0.21101674437522888,
        0.12356385588645935,
        0.2923842668533325,
    ]


def test_random_weights_have_variance_one_over_fan_in():
    assert draw_tensor(0, "a.weight", (300, 20, 5)).std().item() == pytest.approx(0.1, rel=0.02)
    assert draw_tensor(0, "embed_tokens.weight", (300, 100)).std().item() == pytest.approx(
        1, rel=0.02
    )
    assert torch.equal(draw_tensor(0, "norm.weight", (4,)), torch.ones(4))
    assert torch.equal(draw_tensor(0, "norm.gamma", (4, 1, 1)), torch.ones(4, 1, 1))
    assert torch.equal(draw_tensor(0, "norm.bias", (4,)), torch.zeros(4))


def test_a_random_transformer_needs_only_a_config_and_has_no_zero_weights(root_copy):
    transformer_file(root_copy).unlink()
    transformer = load_transformer(root_copy, VERSION, random_weights_seed=1)
    for name in ("proj_out", "transformer_blocks.0.norm1.linear", "norm_out.linear"):
        assert transformer.get_submodule(name).weight.all()
    assert_same_model(load_transformer(root_copy, VERSION, random_weights_seed=1), transformer)
    other = load_transformer(root_copy, VERSION, random_weights_seed=2)
    assert not torch.equal(other.proj_out.weight, transformer.proj_out.weight)


# --- saved weights ----------------------------------------------------------------------------


def test_saved_weights_are_copied_into_a_model_in_its_dtype(root, transformer, tmp_path):
    load_transformer(root, VERSION, random_weights_seed=1).save_pretrained(tmp_path)
    address = transformer.to(torch.bfloat16).proj_out.weight.data_ptr()
    load_transformer_weights(transformer, tmp_path)
    assert transformer.proj_out.weight.data_ptr() == address
    assert_same_model(transformer, load_transformer(tmp_path, None, dtype=torch.bfloat16))


def test_incomplete_weights_leave_the_model_unchanged(root, transformer, tmp_path):
    load_transformer(root, VERSION, random_weights_seed=1).save_pretrained(tmp_path)
    rewrite(tmp_path / FILE, lambda tensors: tensors.pop("proj_out.bias"))
    with pytest.raises(ValueError, match=r"proj_out\.bias"):
        load_transformer_weights(transformer, tmp_path)
    assert_same_model(transformer, load_transformer(root, VERSION))


# --- VAE --------------------------------------------------------------------------------------


def test_vae_latents_and_frames_match_the_original(root, golden_video):
    golden = load_file(GOLDEN / "vae.safetensors")
    mean, logvar, frames_0_8 = (
        golden[f"clip17/{name}"] for name in ("mean", "logvar", "decoded_frames_0_8")
    )
    vae = load_vae(root)
    with torch.no_grad():
        posterior = vae.encode(golden_video).latent_dist
        frames = vae.decode(posterior.mean).sample
    for actual, expected in (
        (posterior.mean, mean),
        (posterior.logvar, logvar),
        (frames[:, :, [0, 8]], frames_0_8),
    ):
        # 2.1e-6 on some processors
        assert (actual - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_encoding_and_decoding_a_batch_matches_single_videos(root):
    vae = load_vae(root)
    videos = torch.randn(3, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = vae.encode(videos).latent_dist.mode()
        frames = vae.decode(latents).sample
        for i in range(3):
            torch.testing.assert_close(
                vae.encode(videos[i : i + 1]).latent_dist.mode(), latents[i : i + 1]
            )
            torch.testing.assert_close(vae.decode(latents[i : i + 1]).sample, frames[i : i + 1])


def test_a_decoder_used_in_inference_mode_can_be_trained_afterwards(root):
    vae = load_vae(root)
    latents = torch.randn(2, 4, 2, 2, 3)
    with torch.inference_mode():
        vae.decode(latents)
    vae.decode(latents).sample.sum().backward()
    assert vae.decoder.mid_block.attentions[0].to_q.weight.grad.abs().sum() > 0


# --- memory -----------------------------------------------------------------------------------


MEASURE = """
import re, sys
from pathlib import Path
import torch
from hyvideo.models.loading import load_transformer

def memory(line):
    return int(re.search(line + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
load_transformer("assets/miniature", "miniature")  # triggers all imports
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
model = load_transformer(sys.argv[1], "big", dtype=torch.float16)
print(memory("VmHWM") - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's memory accounting"
)
def test_loading_needs_little_more_memory_than_the_model(tmp_path):
    sizes = {
        "num_attention_heads": 4,
        "attention_head_dim": 128,
        "num_layers": 8,
        "text_embed_dim": 64,
    }
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(**sizes)
    model = model.half().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    save_original(model, tmp_path / "transformer" / "big")
    result = subprocess.run(
        [python(), "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    peak, size = map(int, result.stdout.split())
    assert size > 150e6
    assert peak <= 1.1 * size
