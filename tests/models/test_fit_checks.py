import shutil

from hyvideo.data.prompts import Request
from hyvideo.models.fit_checks import check_checkpoint
from tests.models.checkpoint_files import VERSION

REQUESTS = [Request("a cat")]


def test_a_complete_checkpoint_has_no_problems(root):
    assert check_checkpoint(root, VERSION, REQUESTS) == []


def test_all_corrupted_components_are_reported_at_once(root_copy):
    (root_copy / "vae" / "config.json").write_text("{")
    shutil.rmtree(root_copy / "text_encoder")
    transformer, vae, text_encoder = check_checkpoint(root_copy, "720p_t2v", REQUESTS)
    assert "720p_t2v" in transformer
    assert VERSION in transformer
    assert "not valid JSON" in vae
    assert "text encoder" in text_encoder


def test_random_weights_need_only_the_configs(root_copy):
    for path in root_copy.rglob("*.safetensors"):
        path.unlink()
    assert len(check_checkpoint(root_copy, VERSION, REQUESTS)) == 3
    assert check_checkpoint(root_copy, VERSION, REQUESTS, weights_needed=False) == []
