"""Latents of given videos: encoded once, stored in the output folder of a run, and
read when needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.data.examples import LATENTS_KEY, LATENTS_SUFFIX, VAE_KEY, VIDEO_KEY
from hyvideo.data.video_files import ClipForm, read_header
from hyvideo.data.videos import read_clip
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.digests import digest_file, digest_of
from hyvideo.files.files import make_folder, publish
from hyvideo.files.text import note
from hyvideo.models.decoding import encode

FOLDER = "latents"  # in the output folder of a run


def write_latents(video: Path, latents: Tensor, *, vae_weights: str) -> None:
    """Write the latents of a video beside it, with the digests of the video and of the VAE's weights.

    Shape: (channels, frames, height, width).
    """
    metadata = {VIDEO_KEY: digest_file(video), VAE_KEY: vae_weights}
    _save(video.with_suffix(LATENTS_SUFFIX), latents, metadata)


class VideoLatents:
    """Latents of videos in the form of a training video, by path: from the file beside a video if it
    has the latents of this video and VAE, else encoded by the VAE.

    Encoded latents are stored under a digest of the video, the form and the VAE, so that a run
    encodes each video once.
    """

    def __init__(
        self,
        output_dir: Path,
        videos: Sequence[Path],
        *,
        form: ClipForm,
        vae_weights: str,  # digest of the VAE's weights, of which given latents must be
        vae_identity: str,  # digest of the VAE and of its settings
    ):
        self.folder = output_dir / FOLDER
        self.form = form
        self.digests = {video: digest_file(video) for video in videos}
        self.files: dict[Path, Path] = {}
        num_others = 0
        for video, digest in self.digests.items():
            given = video.with_suffix(LATENTS_SUFFIX)
            found = _metadata_of(given)
            is_given = found.get(VIDEO_KEY) == digest and not form.changes(read_header(video))
            if is_given and found.get(VAE_KEY) == vae_weights:
                self.files[video] = given
            else:
                num_others += is_given
                key = digest_of(digest, vae_identity, asdict(form))
                self.files[video] = self.folder / f"{key}{LATENTS_SUFFIX}"
        if num_others:
            note(
                f"the latents beside {num_others} videos are of another VAE and not used; the run "
                "encodes these videos"
            )

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
                on_stage("videos", f"video {number}/{len(missing)}")
                pixels = read_clip(video, self.form)
                metadata = {VIDEO_KEY: self.digests[video]}
                _save(self.files[video], encode(vae, [pixels])[0], metadata)

    def read(self, video: Path) -> Tensor:
        """Return the latents of a video, on the CPU. Shape: (channels, frames, height, width)."""
        return load_file(self.files[video])[LATENTS_KEY].float()


def _metadata_of(latents: Path) -> dict[str, str]:
    """Return the digests in a file of latents, empty without such a file."""
    try:
        with safe_open(latents, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _save(path: Path, latents: Tensor, metadata: dict[str, str]) -> None:
    latents = latents.detach().to("cpu", torch.float32).contiguous()
    with publish(path) as temporary:
        save_file({LATENTS_KEY: latents}, temporary, metadata=metadata)
