"""Weights by the name of their repository: a hub on this machine, and a cache without a network."""

import hashlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hyvideo.models.loading import load_vae
from hyvideo.weights.hub import local_folder
from tests.forked import LIGHT, python
from tests.tiny_wan import write_wan

REPOSITORY = "Somebody/Wan-Diffusers"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNNEEDED = (
    "README.md",
    "assets/cover.png",
    "vae/diffusion_pytorch_model.bin",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "models_t5.pth",
)
CODE = "import sys; from hyvideo.weights.hub import local_folder; print(local_folder(sys.argv[1]))"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A repository's files: a pipeline, and what repositories also have."""
    root = write_wan(tmp_path_factory.mktemp("repository"))
    for name in UNNEEDED:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"unneeded")
    return root


def needed_files(root):
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert set(UNNEEDED) < names
    return names - set(UNNEEDED)


def found_in(folder, *, variables):
    """Return what another process prints as the folder of a repository."""
    return subprocess.run(
        [python(LIGHT), "-c", CODE, str(folder)],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def hub(source):
    """A server that answers as the hub does, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body):
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{REPOSITORY}"):
                files = [path for path in source.rglob("*") if path.is_file()]
                names = [str(file.relative_to(source)) for file in files]
                content = {"id": REPOSITORY, "sha": COMMIT, "private": False, "tags": []}
                content |= {"downloads": 0, "likes": 0}
                content["siblings"] = [{"rfilename": name} for name in names]
                if "/tree/" in path:
                    content = [
                        {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                        for name, file in zip(names, files)
                    ]
                body = json.dumps(content).encode()
            else:
                file = source / path.partition(f"/resolve/{COMMIT}/")[2]
                if not path.startswith(f"/{REPOSITORY}/resolve/") or not file.is_file():
                    self.send_error(404)
                    return
                body = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_repository_is_downloaded_once_without_files_that_no_part_reads(source, hub, tmp_path):
    variables = {"HF_HUB_CACHE": tmp_path, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    online = found_in(REPOSITORY, variables=variables)
    folder = online.stdout.strip()
    names = {
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, files in os.walk(folder)
        for name in files
    }
    assert names == needed_files(source), online.stderr
    offline = found_in(REPOSITORY, variables=variables | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout.strip() == folder
    cached = tmp_path / "models--Somebody--Wan-Diffusers"
    assert local_folder(cached) == folder
    expected = load_vae(source).state_dict()
    for name, tensor in load_vae(local_folder(cached)).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_a_repository_that_is_not_cached_is_one_sentence_without_a_network(tmp_path):
    missing = found_in(REPOSITORY, variables={"HF_HUB_CACHE": tmp_path, "HF_HUB_OFFLINE": "1"})
    assert missing.returncode == 1
    last = missing.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and REPOSITORY in last


def test_a_repository_in_another_layout_is_refused_before_its_weights_are_downloaded(
    hub, source, tmp_path
):
    index = source / "model_index.json"
    index.rename(source / "other.json")
    try:
        variables = {"HF_HUB_CACHE": tmp_path, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
        found = found_in(REPOSITORY, variables=variables)
    finally:
        (source / "other.json").rename(index)
    assert found.returncode == 1 and "model_index.json" in found.stderr.splitlines()[-1]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_branch_main_decides_among_snapshots(tmp_path):
    folder = tmp_path / "models--X--Y"
    for commit in ("aaa", "bbb"):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    for commit in ("aaa", "bbb"):
        (folder / "refs" / "main").write_text(commit)
        assert local_folder(folder) == str(folder / "snapshots" / commit)


def test_a_folder_is_itself(tmp_path, monkeypatch):
    """Also one that looks like the name of a repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "wan").mkdir(parents=True)
    assert [local_folder(path) for path in ("outputs/wan", "./ckpts")] == ["outputs/wan", "./ckpts"]
