import shutil

from hyvideo.data.prompts import Request
from hyvideo.models.fit_checks import check_checkpoint
from tests.models.checkpoint_files import VERSION

REQUESTS = [Request("a cat")]


def test_all_corrupted_components_are_reported_at_once(root_copy):
    (root_copy / "vae" / "config.json").write_text("{")
    shutil.rmtree(root_copy / "text_encoder")
    transformer, vae, text_encoder = check_checkpoint(root_copy, "720p_t2v", REQUESTS)
    assert "720p_t2v" in transformer
    assert VERSION in transformer
    assert "config.json" in vae
    assert "text encoder" in text_encoder


def test_random_weights_need_only_the_configs(root_copy):
    for path in root_copy.rglob("*.safetensors"):
        path.unlink()
    assert len(check_checkpoint(root_copy, VERSION, REQUESTS)) == 3
    assert check_checkpoint(root_copy, VERSION, REQUESTS, weights_needed=False) == []


def test_a_missing_encoder_of_some_prompts_names_the_first_of_them(root_copy):
    quoted = Request('a sign says "OPEN"', place="row 2 of x.csv")
    for folder in ("byt5-small", "Glyph-SDXL-v2"):
        shutil.rmtree(root_copy / "text_encoder" / folder, ignore_errors=True)
    (problem,) = check_checkpoint(root_copy, VERSION, [*REQUESTS, quoted, Request('"NO"')])
    assert "glyph encoder" in problem and "row 2 of x.csv" in problem
    assert check_checkpoint(root_copy, VERSION, REQUESTS) == []
