"""Latents of given videos: encoded once, stored in the output folder of a run, and
read when needed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.data.digests import digest_file, digest_of
from hyvideo.data.examples import LATENTS_KEY, LATENTS_SUFFIX, VIDEO_KEY
from hyvideo.data.files import make_folder, publish
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.decoding import encode

FOLDER = "latents"  # in the output folder of a run


def write_latents(video: Path, latents: Tensor) -> None:
    """Write the latents of a video beside it, with the digest of the video.

    Shape: (channels, frames, height, width).
    """
    _save(video.with_suffix(LATENTS_SUFFIX), latents, digest_file(video))


class VideoLatents:
    """Latents of videos by path, from the file beside a video if it has the latents of this video,
    else encoded by the VAE.

    Encoded latents are stored under a digest of the video and the VAE, so that a run encodes each
    video once.
    """

    def __init__(self, output_dir: Path, videos: Sequence[Path], *, vae_identity: str):
        self.folder = output_dir / FOLDER
        self.digests = {video: digest_file(video) for video in videos}
        self.files: dict[Path, Path] = {}
        for video, digest in self.digests.items():
            given = video.with_suffix(LATENTS_SUFFIX)
            if _video_of(given) == digest:
                self.files[video] = given
            else:
                key = digest_of(digest, vae_identity)
                self.files[video] = self.folder / f"{key}{LATENTS_SUFFIX}"

    @property
    def contents(self) -> str:
        """Return a digest of all videos, in order, and of latents that were given with them."""
        given = [
            digest_file(file) if file.parent != self.folder else None
            for file in self.files.values()
        ]
        return digest_of(list(self.digests.values()), given)

    def encode(
        self,
        vae: nn.Module,
        mesh: Mesh,
        *,
        size: tuple[int, int],  # height and width in pixels, before small videos were enlarged
        on_stage: Callable[[str, str], None] = lambda stage, part: None,  # called for each video
    ) -> None:
        """Encode the videos that have no stored latents, divided among the ranks. Collective.

        Raises ValueError, on all ranks, for a video that cannot be read.
        """
        own = list(self.files)[mesh.rank :: mesh.world_size]
        with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
            missing = [video for video in own if not self.files[video].is_file()]
            if missing:
                make_folder(self.folder)
            for number, video in enumerate(missing, 1):
                on_stage("pairs", f"video {number}/{len(missing)}")
                pixels = at_original_size(read_video(video)[0], *size)
                _save(self.files[video], encode(vae, [pixels])[0], self.digests[video])

    def read(self, video: Path) -> Tensor:
        """Return the latents of a video, on the CPU. Shape: (channels, frames, height, width)."""
        return load_file(self.files[video])[LATENTS_KEY].float()


def _video_of(latents: Path) -> str | None:
    """Return the digest of the video that a file of latents belongs to, None without such a file."""
    try:
        with safe_open(latents, framework="numpy") as file:
            return (file.metadata() or {}).get(VIDEO_KEY)
    except (OSError, SafetensorError):
        return None


def _save(path: Path, latents: Tensor, digest: str) -> None:
    latents = latents.detach().to("cpu", torch.float32).contiguous()
    with publish(path) as temporary:
        save_file({LATENTS_KEY: latents}, temporary, metadata={VIDEO_KEY: digest})
