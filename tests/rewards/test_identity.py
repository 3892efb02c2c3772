"""Hashes of the weights and the code of scorers."""

import shutil

from hyvideo.files.files import ROOT
from hyvideo.rewards.identity import files_hash, scorer_identity

NAME = "miniature_videoalign"


def test_other_weights_of_a_scorer_have_another_hash(tmp_path):
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    before = files_hash(NAME, root, {})
    assert before == files_hash(NAME, tmp_path, {"path": str(root)})
    assert before == files_hash(NAME, root.rename(tmp_path / "moved"), {})
    root = tmp_path / "moved"
    (root / "reference_statistics.safetensors").write_bytes(b"")
    assert files_hash(NAME, root, {}) == before
    identity = scorer_identity(NAME, root, {})
    file = root / "VideoReward" / "checkpoint-1" / "model.pth"
    content = bytearray(file.read_bytes())
    content[-8:] = bytes(byte ^ 1 for byte in content[-8:])
    file.write_bytes(content)
    assert files_hash(NAME, root, {}) != before
    assert scorer_identity(NAME, root, {}) != identity
    assert files_hash("miniature", root, {}) == ""
    assert files_hash("vlm_judge", root, {"url": "http://127.0.0.1"}) == ""


def test_the_identity_of_a_scorer_has_its_code_and_its_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass\n")
    name = f"{file}:Mine"
    identities = [
        scorer_identity(name, tmp_path, {}),
        scorer_identity(f"{file}:Other", tmp_path, {}),
        scorer_identity(name, tmp_path, {"scale": 2.0}),
    ]
    file.write_text("class Mine: x = 1\n")
    identities.append(scorer_identity(name, tmp_path, {}))
    assert len(set(identities)) == 4
