"""Weight files that are damaged although their headers are intact are refused; files in which
zeros are meant are not.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.lora_files import read_lora
from hyvideo.weights.damage import check_values
from hyvideo.weights.weight_files import UNFINISHED, read_pickle, read_safetensors

ASSETS = Path("assets/miniature").resolve()
NAME = "diffusion_pytorch_model.safetensors"


def zero(path: Path, start: float, end: float) -> None:
    """Replace a part of a file by zeros; ``start`` and ``end`` are shares of its size."""
    content = bytearray(path.read_bytes())
    places = slice(int(start * len(content)), int(end * len(content)))
    content[places] = bytes(places.stop - places.start)
    path.write_bytes(content)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "folder, load, start, end",
    [
        ("transformer/miniature", lambda root: load_transformer(root, "miniature"), 0.9, 1),
        ("vae", load_vae, 0.4, 0.5),
    ],
)
def test_a_file_with_a_part_of_zeros_is_refused(tmp_path, folder, load, start, end):
    shutil.copytree(ASSETS, tmp_path / "miniature")
    load(tmp_path / "miniature")
    file = tmp_path / "miniature" / folder / NAME
    zero(file, start, end)
    with pytest.raises(ValueError, match=str(file)):
        load(tmp_path / "miniature")


def test_the_mark_of_an_unfinished_download_is_refused(tmp_path):
    ending = UNFINISHED[0]
    shutil.copytree(ASSETS, tmp_path / "miniature")
    load_vae(tmp_path / "miniature")
    (tmp_path / "miniature/vae" / f"{NAME}{ending}").touch()
    with pytest.raises(ValueError, match=f"{NAME}{ending}"):
        load_vae(tmp_path / "miniature")


def test_a_hole_of_a_mebibyte_in_a_large_matrix_is_refused():
    weight = random(4096, 4096)
    check_values({"weight": weight}, "model", "file")
    weight.flatten()[123_457 : 123_457 + 2**18] = 0
    with pytest.raises(ValueError, match="'weight' in file"):
        check_values({"weight": weight}, "model", "file")


@pytest.mark.parametrize(
    "value, dtype", [(float("nan"), torch.float32), (float("-inf"), torch.float16)]
)
def test_a_value_that_is_not_finite_is_refused(value, dtype):
    weight = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    check_values({"weight": weight}, "model", "file")
    weight[1, 2] = value
    with pytest.raises(ValueError, match="'weight' in file"):
        check_values({"weight": weight}, "model", "file")


def test_zeros_that_are_meant_are_accepted():
    embedding = random(1000, 512)
    embedding[0] = 0  # padding
    embedding[-9:] = 0  # unused
    image_channels = random(64, 36, 2, 2)
    image_channels[:, 16:] = 0  # new ones of an image-to-video model
    types = random(3, 2048)
    types[1] = 0
    tensors = {
        "embedding": embedding,
        "conv.weight": image_channels,
        "types": types,
        "fused.bias": torch.cat([random(20_000), torch.zeros(20_000), random(20_000)]),
        "final.modulation.weight": torch.zeros(1024, 512),
        "final.projection.bias": torch.zeros(1024),
        "final.projection.weight": torch.zeros(1024, 512),
        "count": torch.zeros((), dtype=torch.int64),
        "empty": torch.zeros(0, 5),
    }
    check_values(tensors, "model", "file")


def test_a_file_of_zeros_is_refused():
    check_values({"bias": torch.zeros(9)}, "model", "file")
    with pytest.raises(ValueError, match="file"):
        check_values({"bias": torch.zeros(9), "head.weight": torch.zeros(9, 9)}, "model", "file")


def test_a_new_lora_is_accepted_and_one_with_a_half_of_zeros_is_not(tmp_path):
    names = [f"transformer.transformer_blocks.{block}.attn.to_q" for block in range(8)]
    tensors = {f"{name}.lora_A.weight": random(4, 64) for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.zeros(64, 4) for name in names}
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    assert len(read_lora(file)) == 8
    zero(file, 0.5, 1)
    with pytest.raises(ValueError, match=str(file)):
        read_lora(file)


def test_files_of_reward_models_are_looked_at(tmp_path):
    tensors = {f"layer.{number}.weight": random(64, 64) for number in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "model.pth")
    for name, read in (("model.safetensors", read_safetensors), ("model.pth", read_pickle)):
        read(tmp_path / name, "reward")
        zero(tmp_path / name, 0.25, 0.9)
        with pytest.raises(ValueError, match=name):
            read(tmp_path / name, "reward")
