"""Write a checkpoint folder from a network of the installed package galaxygrad.

    pip install --no-deps galaxygrad==0.1.9
    python -m examples.galaxies.convert --network quasar_lens72 --output_dir outputs/galaxies/quasar_lens72

A file of the package is a sequence of numpy arrays in the order of the network's layers. It is read
without the package's own code, which needs jax.
"""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.galaxies.network import GalaxyScoreNet
from examples.galaxies.pixels import GalaxyPixels

NUM_LAYERS = 4
INSTALL = "pip install --no-deps galaxygrad==0.1.9"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint folder of galaxygrad.")
    parser.add_argument("--network", default="quasar_lens72", help="name of a file eqx_NAME.eqx")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/galaxies/quasar_lens72"))
    options = parser.parse_args()
    write(options.network, options.output_dir)
    print(f"{options.output_dir} has the network {options.network}")


def write(network: str, root: Path, *, peak: float = 11.0) -> None:
    """Write transformer and VAE in diffusers' layout.

    Raises ValueError if the package is not installed.
    """
    load(network).save_pretrained(root / "transformer")
    GalaxyPixels(peak=peak).save_pretrained(root / "vae")


def load(network: str) -> GalaxyScoreNet:
    """Return a network of the package in eval mode, with the sizes of its arrays."""
    state = read(find(network))
    width, _, patch_size, _ = state["conv_in.weight"].shape
    mixer_size, num_patches = state["blocks.0.patch_mixer.up.weight"].shape
    model = GalaxyScoreNet(
        image_size=patch_size * round(num_patches**0.5),
        patch_size=patch_size,
        hidden_size=width,
        mixer_size=mixer_size,
        num_layers=NUM_LAYERS,
    )
    model.load_state_dict(state)
    return model.eval()


def find(network: str) -> Path:
    """Return the file of a network in the installed package.

    Raises ValueError if the package or the file is missing.
    """
    package = find_spec("galaxygrad")
    if package is None:
        raise ValueError(f"the package galaxygrad is not installed: {INSTALL}")
    folder = Path(package.origin).parent
    file = folder / f"eqx_{network}.eqx"
    if not file.is_file():
        names = sorted(path.stem.removeprefix("eqx_") for path in folder.glob("*.eqx"))
        available = ", ".join(names) or f"none, because 0.2 downloads its networks: {INSTALL}"
        raise ValueError(f"galaxygrad has no network {network!r}; it has {available}")
    return file


def read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by the names of `GalaxyScoreNet`."""
    state = {}
    with file.open("rb") as stream:
        for name in names_in_order():
            state[name] = torch.from_numpy(np.load(stream).copy())
    for name in ("conv_in.bias", "conv_out.bias"):
        state[name] = state[name].flatten()
    # stored as the kernel of a convolution: (out, in, height, width), and mirrored
    state["conv_out.weight"] = state["conv_out.weight"].flip(2, 3).transpose(0, 1).contiguous()
    return state


def names_in_order() -> Iterator[str]:
    """Yield the names of the tensors in the order of the package's files."""
    for layer in layers_in_order():
        yield f"{layer}.weight"
        yield f"{layer}.bias"


def layers_in_order() -> Iterator[str]:
    yield "conv_in"
    yield "conv_out"
    for number in range(NUM_LAYERS):
        for mixer in ("patch_mixer", "channel_mixer"):
            yield f"blocks.{number}.{mixer}.up"
            yield f"blocks.{number}.{mixer}.down"
        yield f"blocks.{number}.patch_norm"
        yield f"blocks.{number}.channel_norm"
    yield "norm"


if __name__ == "__main__":
    main()
