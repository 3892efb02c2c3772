"""Latents of the videos of rated pairs: encoded once, stored in the output folder of a run, and
read when needed.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.data.files import make_folder, replacing
from hyvideo.data.pairs import LATENTS_KEY, LATENTS_SUFFIX, VIDEO_KEY, hash_file
from hyvideo.data.text import quote
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.distributed.collectives import barrier, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.decoding import encode

FOLDER = "latents"  # in the output folder of a run


def write_latents(video: Path, latents: Tensor) -> None:
    """Write the latents of a video beside it, marked with its hash.

    Shape: (channels, frames, height, width).
    """
    _save(video.with_suffix(LATENTS_SUFFIX), latents, hash_file(video))


class PairLatents:
    """Latents of videos by path, from the file beside a video if there is one, else encoded by the
    VAE.

    Encoded latents are stored under a hash of the video and the VAE, so that a run encodes each
    video once.
    """

    def __init__(self, output_dir: Path, videos: Sequence[Path], *, vae_identity: str):
        self.folder = output_dir / FOLDER
        self.hashes = {video: hash_file(video) for video in videos}
        self.files: dict[Path, Path] = {}
        for video, digest in self.hashes.items():
            given = video.with_suffix(LATENTS_SUFFIX)
            if given.is_file():
                self.files[video] = given
            else:
                key = hashlib.blake2b(
                    f"{digest} {vae_identity}".encode(), digest_size=16
                ).hexdigest()
                self.files[video] = self.folder / f"{key}{LATENTS_SUFFIX}"

    @property
    def contents(self) -> str:
        """Return a hash of all videos, in order, and of latents that were given with them."""
        parts = []
        for video, digest in self.hashes.items():
            given = self.files[video].parent != self.folder
            parts.append(f"{digest} {hash_file(self.files[video])}" if given else digest)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def encode(
        self,
        vae: nn.Module,
        mesh: Mesh,
        *,
        size: tuple[int, int],  # height and width in pixels, before small videos were enlarged
        shape: tuple[int, int, int, int],  # of the latents of a video
        on_stage: Callable[[str, str], None] = lambda stage, part: None,  # called for each video
    ) -> None:
        """Encode the videos that have no stored latents, divided among the ranks. Collective.

        Raises ValueError, on all ranks, for a video that cannot be read and for latents of another
        shape.
        """
        missing = [video for video, file in self.files.items() if not self._is_stored(file)]
        barrier(mesh)  # all ranks look for files before the first one writes
        own = missing[mesh.rank :: mesh.world_size]
        with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
            if own:
                make_folder(self.folder)
            for number, video in enumerate(own, 1):
                on_stage("pairs", f"video {number}/{len(own)}")
                pixels = at_original_size(read_video(video)[0], *size)
                _save(self.files[video], encode(vae, [pixels])[0], self.hashes[video])
        with raise_on_all_ranks(mesh):
            for video in list(self.files)[mesh.rank :: mesh.world_size]:
                found = tuple(self.read(video).shape)
                if found != tuple(shape):
                    raise ValueError(
                        f"the latents of {quote(video)} must have the shape {tuple(shape)}, got "
                        f"{found} in {self.files[video]}; delete this file"
                    )

    def read(self, video: Path) -> Tensor:
        """Return the latents of a video, on the CPU. Shape: (channels, frames, height, width)."""
        file = self.files[video]
        try:
            return load_file(file)[LATENTS_KEY].float()
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(
                f"{quote(file)} must have the latents of {quote(video)}: {error}; delete it"
            ) from error

    def _is_stored(self, file: Path) -> bool:
        """Return whether a file can be read.

        A file that was not written to its end is written again.
        """
        with suppress(SafetensorError, OSError):
            return LATENTS_KEY in load_file(file)
        return False


def _save(path: Path, latents: Tensor, digest: str) -> None:
    with replacing(path) as temporary:
        tensors = {LATENTS_KEY: latents.detach().to("cpu", torch.float32).contiguous()}
        save_file(tensors, temporary, metadata={VIDEO_KEY: digest})
