"""Latents of the videos of rated pairs: encoded once, stored in the output folder of a run, and
read when needed.

Stored latents are found by the contents of the video, the VAE and the size. A file beside a video
is used instead of them; it has the digest of its video.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.data.digests import digest_file, digest_of
from hyvideo.data.files import make_folder, publish
from hyvideo.data.pairs import LATENTS_SUFFIX
from hyvideo.data.text import quote
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.decoding import encode

FOLDER = "latents"  # in the output folder of a run
# the tensor in a file; the digest of the video in the metadata of a file beside it
LATENTS_KEY, VIDEO_KEY = "latents", "video"


def write_latents(video: Path, latents: Tensor) -> None:
    """Write the latents of a video beside it, marked with its digest.

    Shape: (channels, frames, height, width).
    """
    _save(video.with_suffix(LATENTS_SUFFIX), latents, {VIDEO_KEY: digest_file(video)})


class PairLatents:
    """Latents of videos by path, from the file beside a video if there is one, else encoded by the
    VAE.

    ``size`` is (frames, height, width) in pixels, before small videos were enlarged, and
    ``latent_size`` the same in latents. Raises ValueError for a file beside a video that does not
    have its latents of this size.
    """

    def __init__(
        self,
        output_dir: Path,
        videos: Sequence[Path],
        *,
        vae_identity: str,
        size: tuple[int, int, int],
        latent_size: tuple[int, int, int],
    ):
        self.folder = output_dir / FOLDER
        self.size = size
        self.digests = {video: digest_file(video) for video in videos}
        self.files: dict[Path, Path] = {}
        self.given: list[Path] = []  # files beside the videos
        for video, digest in self.digests.items():
            beside = video.with_suffix(LATENTS_SUFFIX)
            if beside.is_file():
                _check(beside, digest, latent_size)
                self.given.append(beside)
                self.files[video] = beside
            else:
                key = digest_of(digest, vae_identity, size)
                self.files[video] = self.folder / f"{key}{LATENTS_SUFFIX}"

    @property
    def contents(self) -> str:
        """Return a digest of all videos, in order, and of latents that were given with them."""
        return digest_of([*self.digests.values(), *map(digest_file, self.given)])

    def encode(
        self,
        vae: nn.Module,
        mesh: Mesh,
        *,
        on_stage: Callable[[str, str], None] = lambda stage, part: None,  # called for each video
    ) -> None:
        """Encode the videos that have no stored latents, divided among the ranks. Collective.

        Raises ValueError, on all ranks, for a video that cannot be read or has changed since the
        start.
        """
        own = list(self.files)[mesh.rank :: mesh.world_size]
        with raise_on_all_ranks(mesh, errors=(ValueError, OSError)):
            missing = [video for video in own if not _is_stored(self.files[video])]
            if missing:
                make_folder(self.folder)
            for number, video in enumerate(missing, 1):
                on_stage("pairs", f"video {number}/{len(missing)}")
                pixels = at_original_size(read_video(video)[0], *self.size[1:])
                if digest_file(video) != self.digests[video]:
                    raise ValueError(
                        f"{quote(video)} has changed since the start of the run; start it again "
                        "when no program writes its videos"
                    )
                _save(self.files[video], encode(vae, [pixels])[0])

    def read(self, video: Path) -> Tensor:
        """Return the latents of a video, on the CPU. Shape: (channels, frames, height, width).

        Raises ValueError if its file is gone or cut.
        """
        file = self.files[video]
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(LATENTS_KEY).float()
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(
                f"{quote(file)} must have the latents of {quote(video)}, got: {error}; resume the "
                "run, which encodes videos without latents again"
            ) from error


def _check(file: Path, digest: str, latent_size: tuple[int, int, int]) -> None:
    """Raise ValueError if a file beside a video has no latents of this size, or those of a video
    with another digest.
    """
    problem = None
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            latents = opened.get_tensor(LATENTS_KEY)
    except SafetensorError as error:
        problem = str(error)
    else:
        if metadata.get(VIDEO_KEY) != digest:
            problem = "those of another video"
        elif tuple(latents.shape[1:]) != latent_size:
            expected = ", ".join(map(str, latent_size))
            problem = f"the shape {tuple(latents.shape)}, not (channels, {expected})"
        elif not latents.is_floating_point() or not latents.isfinite().all():
            problem = "values that are not finite floating-point numbers"
    if problem:
        raise ValueError(
            f"{quote(file)} must have the latents of the video beside it, got {problem}; restore "
            "the file, or delete it, so that the video is encoded (a resume then needs "
            "allow_changed_settings pairs_csv)"
        )


def _is_stored(file: Path) -> bool:
    """Return whether a file of latents is there and complete."""
    with suppress(SafetensorError, FileNotFoundError), safe_open(file, framework="pt") as opened:
        return LATENTS_KEY in opened.keys()  # noqa: SIM118
    return False


def _save(path: Path, latents: Tensor, metadata: dict[str, str] | None = None) -> None:
    latents = latents.detach().to("cpu", torch.float32).contiguous()
    with publish(path) as temporary:
        save_file({LATENTS_KEY: latents}, temporary, metadata=metadata)
