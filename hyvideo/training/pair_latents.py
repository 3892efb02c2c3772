"""Latents of the videos of rated pairs: encoded once, stored in the output folder of a run, and
read when needed.

A file of latents has a hash of its video and one of the latents. A stored file that does not match
its hashes is encoded again. A file beside a video that does not match them is an error.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.data.files import make_folder, publish
from hyvideo.data.pairs import LATENTS_KEY, LATENTS_SUFFIX, VIDEO_KEY, hash_file
from hyvideo.data.text import quote
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.decoding import encode
from hyvideo.models.stored_tensors import VALUES_KEY, hash_of

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

        Raises ValueError, on all ranks, for a video that cannot be read or has changed since it was
        hashed, and for latents of another shape.
        """
        own = list(self.files)[mesh.rank :: mesh.world_size]
        with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
            missing = [video for video in own if not self._is_stored(video)]
            if missing:
                make_folder(self.folder)
            for number, video in enumerate(missing, 1):
                on_stage("pairs", f"video {number}/{len(missing)}")
                pixels = at_original_size(read_video(video)[0], *size)
                if hash_file(video) != self.hashes[video]:
                    raise ValueError(
                        f"{quote(video)} has changed since the start of the run; start it again "
                        "when no program writes its videos"
                    )
                _save(self.files[video], encode(vae, [pixels])[0], self.hashes[video])
            for video in own:
                found = tuple(self.read(video).shape)
                if found != tuple(shape):
                    raise ValueError(
                        f"the latents of {quote(video)} must have the shape {tuple(shape)}, got "
                        f"{found} in {self.files[video]}; delete this file"
                    )

    def read(self, video: Path) -> Tensor:
        """Return the latents of a video, on the CPU. Shape: (channels, frames, height, width).

        Raises ValueError for a file that does not have the latents of this video.
        """
        file = self.files[video]
        try:
            return self._read(video)
        except (SafetensorError, ValueError, OSError) as error:
            raise ValueError(
                f"{quote(file)} must have the latents of {quote(video)}, got: {error}; restore "
                "the file, or delete the file, so that the video is encoded (a resume with latents "
                "beside the videos then needs allow_changed_settings true)"
            ) from error

    def _read(self, video: Path) -> Tensor:
        """Return the latents of a video. Raises an error for any other contents of the file."""
        file = self.files[video]
        if not file.is_file():  # opening a pipe would never end
            raise ValueError("it is not a regular file")
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            latents = opened.get_tensor(LATENTS_KEY)
        if metadata.get(VIDEO_KEY) != self.hashes[video]:
            raise ValueError("the latents of another video")
        is_own = file.parent == self.folder
        if (is_own or VALUES_KEY in metadata) and metadata.get(VALUES_KEY) != hash_of(latents):
            raise ValueError("values that have changed since the file was written")
        if not latents.is_floating_point() or not latents.isfinite().all():
            raise ValueError("values that are not finite floating-point numbers")
        return latents.float()

    def _is_stored(self, video: Path) -> bool:
        """Return whether the file of a video has its latents; files beside videos are not replaced.

        A file of ours that was not written to its end, or has changed, is written again.
        """
        file = self.files[video]
        if file.parent != self.folder:
            return True
        if os.path.lexists(file) and not file.is_symlink() and not file.is_file():
            raise ValueError(f"{quote(file)} must be a regular file; move it away")
        with suppress(SafetensorError, ValueError, OSError):
            self._read(video)
            return True
        return False


def _save(path: Path, latents: Tensor, digest: str) -> None:
    latents = latents.detach().to("cpu", torch.float32).contiguous()
    with publish(path) as temporary:
        metadata = {VIDEO_KEY: digest, VALUES_KEY: hash_of(latents)}
        save_file({LATENTS_KEY: latents}, temporary, metadata=metadata)
