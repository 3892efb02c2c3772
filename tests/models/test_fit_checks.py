import shutil

from hyvideo.data.prompts import Request
from hyvideo.models.fit_checks import check_checkpoint
from tests.models.checkpoint_files import VERSION

REQUESTS = [Request("a cat")]


def test_a_complete_checkpoint_has_no_problems(root):
    assert check_checkpoint(root, VERSION, REQUESTS) == []


def test_every_broken_component_is_named_at_once(own_root):
    (own_root / "vae" / "config.json").write_text("{")
    shutil.rmtree(own_root / "text_encoder")
    transformer, vae, text_encoder = check_checkpoint(own_root, "720p_t2v", REQUESTS)
    assert "720p_t2v" in transformer
    assert VERSION in transformer
    assert "not JSON" in vae
    assert "text encoder" in text_encoder


def test_random_weights_need_no_files_but_the_configs(own_root):
    for path in own_root.rglob("*.safetensors"):
        path.unlink()
    assert len(check_checkpoint(own_root, VERSION, REQUESTS)) == 3
    assert check_checkpoint(own_root, VERSION, REQUESTS, weights_needed=False) == []
