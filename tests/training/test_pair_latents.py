"""Latents of rated videos: encoded once for each content, VAE and size, or given beside the video."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from hyvideo.data.digests import digest_file
from hyvideo.models.decoding import encode
from hyvideo.models.loading import load_vae
from hyvideo.training.pair_latents import PairLatents, write_latents
from tests.forked import ROOT
from tests.rated_pairs import write_clip

SIZES = {"size": (5, 16, 16), "latent_size": (2, 4, 4)}
GIVEN = torch.ones(4, 2, 4, 4)


@pytest.fixture(scope="module")
def vae():
    return load_vae(ROOT / "assets/miniature", dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def videos(tmp_path):
    paths = [tmp_path / f"{number}.mp4" for number in range(3)]
    for number, path in enumerate(paths):
        write_clip(path, number)
    return paths


@pytest.fixture
def prepare(vae, mesh, tmp_path, monkeypatch):
    """Return a function that returns the latents of videos, and how many it had to encode."""
    encoded = []
    monkeypatch.setattr(
        "hyvideo.training.pair_latents.encode",
        lambda vae, clips: (encoded.append(len(clips)), encode(vae, clips))[1],
    )

    def prepare_videos(videos, vae_identity="a"):
        before = len(encoded)
        latents = PairLatents(tmp_path / "run", videos, vae_identity=vae_identity, **SIZES)
        latents.encode(vae, mesh)
        return latents, len(encoded) - before

    return prepare_videos


def test_a_video_is_encoded_once_unless_its_latents_are_beside_it(prepare, videos):
    write_latents(videos[2], GIVEN)
    latents, count = prepare(videos)
    assert count == 2 and torch.equal(latents.read(videos[2]), GIVEN)
    again, count = prepare(videos)
    assert count == 0 and again.contents == latents.contents
    assert all(torch.equal(again.read(video), latents.read(video)) for video in videos)
    assert latents.read(videos[0]).shape[1:] == SIZES["latent_size"]


def test_another_vae_and_a_replaced_video_are_encoded_again(prepare, videos):
    latents, count = prepare(videos[:2])
    assert count == 2
    assert prepare(videos[:2], vae_identity="b")[1] == 2
    shutil.copyfile(videos[2], videos[0])
    replaced, count = prepare(videos[:2])
    assert count == 1 and replaced.contents != latents.contents
    assert not torch.equal(replaced.read(videos[0]), latents.read(videos[0]))


def test_a_cut_file_is_encoded_again_by_the_next_start(prepare, videos):
    latents, _ = prepare(videos[:1])
    before = latents.read(videos[0]).clone()
    file = latents.files[videos[0]]
    content = file.read_bytes()
    file.unlink()  # the tensors that were read map the file
    file.write_bytes(content[:-9])
    with pytest.raises(ValueError, match=str(videos[0])):
        latents.read(videos[0])
    again, count = prepare(videos[:1])
    assert count == 1
    torch.testing.assert_close(again.read(videos[0]), before)


def test_a_video_that_changes_before_it_is_encoded_is_an_error(vae, mesh, tmp_path, videos):
    """Its latents would be stored under the digest of the earlier video, and used on resume."""
    latents = PairLatents(tmp_path / "run", videos[:2], vae_identity="a", **SIZES)
    write_clip(videos[1], seed=99)
    with pytest.raises(ValueError, match="1.mp4' has changed since the start of the run"):
        latents.encode(vae, mesh)
    assert latents.files[videos[0]].is_file() and not latents.files[videos[1]].exists()


@pytest.mark.parametrize(
    "values, video, reason",
    [
        (torch.ones(4, 2, 3, 3), 0, r"shape \(4, 2, 3, 3\), not \(channels, 2, 4, 4\)"),
        (GIVEN, 1, "those of another video"),
        (GIVEN * torch.nan, 0, "not finite"),
        (GIVEN.long(), 0, "not finite floating-point"),
    ],
)
def test_latents_that_do_not_belong_to_the_video_beside_them_are_refused(
    tmp_path, videos, values, video, reason
):
    write_latents(videos[0], GIVEN)
    PairLatents(tmp_path / "run", videos, vae_identity="", **SIZES)
    metadata = {"video": digest_file(videos[video])}
    save_file({"latents": values}, videos[0].with_suffix(".safetensors"), metadata=metadata)
    with pytest.raises(ValueError, match=f"0.safetensors' .*{reason}"):
        PairLatents(tmp_path / "run", videos, vae_identity="", **SIZES)
