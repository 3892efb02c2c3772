import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hyvideo.data.prompts import Request
from hyvideo.models.download_check.integrity import flaw_of
from hyvideo.models.download_check.report import lines, report
from hyvideo.models.fit_checks import check_checkpoint
from scripts import check_checkpoints
from tests.forked import ROOT
from tests.tiny_wan import write_wan

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:71f9affa1115\nsize 33306432640\n"
TRANSFORMER = "transformer/480p_t2v/diffusion_pytorch_model.safetensors"
GLYPHS = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt"


def write_original(root):
    """The miniature under a released name, with small random encoders for glyphs and images."""
    from transformers import ByT5Tokenizer, SiglipVisionConfig, SiglipVisionModel, T5Config, T5EncoderModel

    shutil.copytree(ROOT / "assets" / "miniature", root, ignore=shutil.ignore_patterns("prompts", "VideoReward"))
    (root / "transformer" / "miniature").rename(root / "transformer" / "480p_t2v")
    glyphs = T5Config(vocab_size=390, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    glyphs.save_pretrained(root / "text_encoder/byt5-small")
    ByT5Tokenizer().save_pretrained(root / "text_encoder/byt5-small")
    for name in ("assets/color_idx.json", "assets/multilingual_10-lang_idx.json"):
        (root / "text_encoder/Glyph-SDXL-v2" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "text_encoder/Glyph-SDXL-v2" / name).write_text('{"white": 0}')
    state = {f"module.text_tower.encoder.{k}": v for k, v in T5EncoderModel(glyphs).encoder.state_dict().items()}
    (root / GLYPHS).parent.mkdir()
    torch.save({"state_dict": state}, root / GLYPHS)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    SiglipVisionModel(vision).save_pretrained(root / "vision_encoder/siglip/image_encoder")
    (root / "vision_encoder/siglip/feature_extractor").mkdir()
    (root / "vision_encoder/siglip/feature_extractor/preprocessor_config.json").write_text("{}")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A small checkpoint folder in the original layout. Not to be written to."""
    root = tmp_path_factory.mktemp("complete") / "ckpts"
    write_original(root)
    return root


@pytest.fixture
def ckpts(complete, tmp_path):
    """A copy of it for tests that break it."""
    return shutil.copytree(complete, tmp_path / "ckpts")


def row_of(checkpoints, folder):
    return next(row for row in checkpoints.rows if row.part.folder == folder)


def states(checkpoints):
    return {row.part.folder: row.state for row in checkpoints.rows}


def lacks(checkpoints, use):
    return [row.part.folder for row in checkpoints.lacking(use)]


def cut(path, num_bytes=100):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def write_reward(root, output_dim=1, lora_r=4):
    checkpoint = root / "VideoReward" / "checkpoint-11352"
    (checkpoint / "tokenizer").mkdir(parents=True)
    (checkpoint / "tokenizer" / "tokenizer.json").write_text("{}")
    config = {
        "data_config": {"max_frame_pixels": 200704, "prompt_template_type": "detailed_special"},
        "model_config": {
            "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct",
            "output_dim": 1,
            "use_special_tokens": True,
            "reward_token": "special",
        },
        "peft_lora_config": {"lora_enable": True, "lora_r": 4},
    }
    (root / "VideoReward" / "model_config.json").write_text(json.dumps(config))
    tensors = {
        "base_model.model.rm_head.weight": torch.zeros(output_dim, 8),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(lora_r, 8),
    }
    torch.save(tensors, checkpoint / "model.pth")


def test_a_complete_folder_can_do_what_it_has(complete):
    checkpoints = report(complete)
    for folder in ("transformer/480p_t2v", "vae", "text_encoder/llm"):
        assert states(checkpoints)[folder] == "ok", row_of(checkpoints, folder).problems
    assert checkpoints.has_a_model
    assert not checkpoints.lacking("t2v")
    assert not checkpoints.lacking("quoted text")
    assert states(checkpoints)["vision_encoder/siglip"] == "ok"
    assert lacks(checkpoints, "i2v") == ["transformer/480p_i2v"]
    assert lacks(checkpoints, "reward") == ["VideoReward"]
    assert row_of(checkpoints, "vae").size >= (complete / "vae/diffusion_pytorch_model.safetensors").stat().st_size


def test_the_miniature_is_a_complete_model():
    checkpoints = report(ROOT / "assets" / "miniature")
    assert checkpoints.has_a_model
    assert states(checkpoints)["transformer/miniature"] == "ok"
    assert lines(checkpoints)[-1].startswith("Can be run: text-to-video")


def test_an_empty_folder_names_every_download(tmp_path):
    checkpoints = report(tmp_path / "ckpts")
    assert set(states(checkpoints).values()) == {"missing"}
    told = "\n".join(lines(checkpoints))
    target = tmp_path / "ckpts"
    assert f'hf download tencent/HunyuanVideo-1.5 --include "transformer/480p_t2v/*" --local-dir {target}' in told
    assert f"hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir {target}/text_encoder/llm" in told
    assert told.splitlines()[-1].startswith("Can be run: nothing. Not: text-to-video (lacks transformer 480p_t2v, VAE")


@pytest.mark.parametrize("folder", ["transformer/480p_t2v", "vae", "text_encoder/llm"])
def test_without_one_of_three_parts_there_is_no_model(ckpts, folder):
    shutil.rmtree(ckpts / folder)
    checkpoints = report(ckpts)
    assert states(checkpoints)[folder] == "missing"
    assert not checkpoints.has_a_model
    assert lacks(checkpoints, "t2v") == [folder]


def test_every_part_is_looked_at_by_itself(ckpts):
    shutil.rmtree(ckpts / "text_encoder" / "byt5-small")
    (ckpts / "vae" / "config.json").unlink()
    checkpoints = report(ckpts)
    found = states(checkpoints)
    assert found["transformer/480p_t2v"] == found["text_encoder/llm"] == "ok"
    assert found["text_encoder/Glyph-SDXL-v2"] == "ok"
    assert found["vae"] == "incomplete"
    assert row_of(checkpoints, "vae").problems == ("vae has no config.json",)


def test_a_truncated_file_is_incomplete(ckpts):
    cut(ckpts / TRANSFORMER)
    row = row_of(report(ckpts), "transformer/480p_t2v")
    assert row.state == "incomplete"
    assert f"{TRANSFORMER} is truncated" in row.problems[0]


def test_a_git_lfs_pointer_is_not_taken_for_weights(ckpts):
    for file in (TRANSFORMER, GLYPHS):
        (ckpts / file).write_text(POINTER)
        row = row_of(report(ckpts), file.rsplit("/", 1)[0].removesuffix("/checkpoints"))
        assert row.state == "incomplete"
        assert "git-lfs pointer" in row.problems[0]


def test_a_wrong_shape_does_not_fit(ckpts):
    with safe_open(ckpts / TRANSFORMER, framework="pt") as file:
        metadata = file.metadata()  # which tensors the compact file leaves to be drawn
    tensors = load_file(ckpts / TRANSFORMER)
    tensors["img_in.proj.bias"] = torch.zeros(3)
    save_file(tensors, ckpts / TRANSFORMER, metadata=metadata)
    checkpoints = report(ckpts)
    row = row_of(checkpoints, "transformer/480p_t2v")
    assert row.state == "does not fit"
    assert any("'img_in.proj.bias'" in problem and "shape (3,)" in problem for problem in row.problems), row.problems
    assert states(checkpoints)["vae"] == "ok"
    assert not checkpoints.has_a_model


def test_a_missing_shard_is_named(ckpts):
    folder = ckpts / "text_encoder" / "llm"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {
        "more": "model-00002-of-00002.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    row = row_of(report(ckpts), "text_encoder/llm")
    assert row.state == "incomplete"
    assert "model-00002-of-00002.safetensors" in row.problems[0]


@pytest.mark.parametrize(
    "file",
    [
        ".cache/huggingface/download/transformer/480p_i2v/abc.71f9.incomplete",
        "transformer/480p_i2v/diffusion_pytorch_model.safetensors.incomplete",
        "._____temp/transformer/480p_i2v/diffusion_pytorch_model.safetensors",
    ],
)
def test_a_download_that_was_broken_off_is_incomplete(ckpts, file):
    (ckpts / file).parent.mkdir(parents=True)
    (ckpts / file).write_bytes(bytes(5000))
    row = row_of(report(ckpts), "transformer/480p_i2v")
    assert row.state == "incomplete"
    assert "5.00kB so far" in row.problems[0]


def test_rests_of_a_download_do_not_spoil_a_complete_part(ckpts):
    (ckpts / "vae" / "old.incomplete").write_bytes(bytes(10))
    assert states(report(ckpts))["vae"] == "ok"


def test_an_unsupported_version_says_why(ckpts):
    shutil.copytree(ckpts / "transformer/480p_t2v", ckpts / "transformer/720p_i2v_distilled_sparse")
    row = row_of(report(ckpts), "transformer/720p_i2v_distilled_sparse")
    assert row.state == "does not fit"
    assert "sparse attention" in row.problems[0]


def test_a_glyph_file_of_another_model_does_not_fit(ckpts):
    torch.save({"state_dict": {"head.weight": torch.zeros(2)}}, ckpts / GLYPHS)
    assert states(report(ckpts))["text_encoder/Glyph-SDXL-v2"] == "does not fit"


def test_the_reward_is_compared_with_its_config(ckpts):
    write_reward(ckpts)
    checkpoints = report(ckpts)
    assert not checkpoints.lacking("reward"), row_of(checkpoints, "VideoReward").problems
    weights = ckpts / "VideoReward/checkpoint-11352/model.pth"
    cut(weights)
    assert states(report(ckpts))["VideoReward"] == "incomplete"


@pytest.mark.parametrize("wrong", [{"output_dim": 3}, {"lora_r": 8}])
def test_a_reward_of_other_shapes_does_not_fit(tmp_path, wrong):
    write_reward(tmp_path, **wrong)
    assert states(report(tmp_path))["VideoReward"] == "does not fit"


def test_a_reward_with_incomplete_settings_does_not_fit(tmp_path):
    write_reward(tmp_path)
    path = tmp_path / "VideoReward" / "model_config.json"
    config = json.loads(path.read_text())
    del config["data_config"]["max_frame_pixels"]
    path.write_text(json.dumps(config))
    row = row_of(report(tmp_path), "VideoReward")
    assert row.state == "does not fit" and "max_frame_pixels" in row.problems[0]


def test_the_diffusers_layout_is_told_by_its_folders(complete, tmp_path):
    from hyvideo.models.loading import load_transformer, load_vae

    load_transformer(complete, "480p_t2v").save_pretrained(tmp_path / "transformer")
    load_vae(complete).save_pretrained(tmp_path / "vae")
    shutil.copytree(complete / "text_encoder/llm", tmp_path / "text_encoder")
    checkpoints = report(tmp_path)
    assert states(checkpoints)["transformer"] == states(checkpoints)["vae"] == "ok"
    assert lacks(checkpoints, "t2v") == ["tokenizer"]
    shutil.copytree(complete / "text_encoder/llm", tmp_path / "tokenizer")
    assert report(tmp_path).has_a_model


def test_a_folder_of_wan_is_complete_and_what_is_lost_is_named(tmp_path):
    root = write_wan(tmp_path / "wan")
    checkpoints = report(root)
    assert checkpoints.has_a_model
    own = [row.part.folder for row in checkpoints.rows if row.is_ok]
    assert own == ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"]
    told = lines(checkpoints)
    assert told[-1] == (
        "Can be run: text-to-video. Not: VideoAlign reward (lacks VideoAlign); "
        "CLIPScore and PickScore (lacks CLIP, PickScore)."
    )
    for folder, lost in [
        ("tokenizer", "tokenizer.json"),
        ("vae", "config.json"),
        ("text_encoder", "model.safetensors"),
    ]:
        (root / folder / lost).unlink()
        checkpoints = report(root)
        assert not checkpoints.has_a_model
        assert folder in lacks(checkpoints, "t2v")
        assert any(f"{folder} has no {lost}" in line for line in lines(checkpoints))


def test_a_transformer_of_wan_in_a_folder_of_its_version_is_found(tmp_path):
    root = write_wan(tmp_path)
    (root / "model_index.json").unlink()
    (root / "transformer").rename(root / "wan2.1_t2v_1.3b")
    (root / "transformer").mkdir()
    (root / "wan2.1_t2v_1.3b").rename(root / "transformer" / "wan2.1_t2v_1.3b")
    assert check_checkpoint(root, "wan2.1_t2v_1.3b", [Request("a")]) == []
    assert row_of(report(root), "transformer/wan2.1_t2v_1.3b").is_ok
    assert report(root).has_a_model


@pytest.mark.parametrize("name", ["WanVAE_", "AutoencoderKLHunyuanVideo15"])
def test_a_vae_that_is_not_diffusers_wan_names_the_repository_to_download(tmp_path, name):
    root = write_wan(tmp_path)
    (root / "vae" / "config.json").write_text(json.dumps({"_class_name": name, "z_dim": 16}))
    row = row_of(report(root), "vae")
    assert row.state == "does not fit"
    assert f"got _class_name '{name}'; download it from Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in row.problems[0]
    assert check_checkpoint(root, None, [Request("a")]) == list(row.problems)


def test_the_name_of_a_folder_of_wan_decides_the_repository_where_nothing_is_there(tmp_path):
    told = "\n".join(lines(report(tmp_path / "wan2.1_t2v_14b")))
    assert "hf download Wan-AI/Wan2.1-T2V-14B-Diffusers" in told
    assert "tencent" not in told and "quoted text" not in told


def test_the_size_of_the_transformer_decides_the_repository(tmp_path):
    write_wan(tmp_path, heads=24, head_dim=6)
    (tmp_path / "vae" / "config.json").unlink()
    assert 'hf download Wan-AI/Wan2.2-TI2V-5B-Diffusers --include "vae/*"' in "\n".join(lines(report(tmp_path)))


def test_a_pipeline_of_two_transformers_cannot_be_used(tmp_path):
    root = write_wan(tmp_path)
    index = json.loads((root / "model_index.json").read_text())
    for absent in (None, [None, None]):
        (root / "model_index.json").write_text(json.dumps(index | {"transformer_2": absent}))
        assert states(report(root))["transformer"] == "ok"
    experts = index | {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
    (root / "model_index.json").write_text(json.dumps(experts))
    row = row_of(report(root), "transformer")
    assert row.state == "does not fit"
    assert "has transformer_2 beside the transformer" in row.problems[0]
    assert check_checkpoint(root, None, [Request("a")]) == list(row.problems)


def test_flaws_of_single_files(tmp_path):
    def flaw(name, content):
        (tmp_path / name).write_bytes(content)
        return flaw_of(tmp_path / name)

    save_file({"a": torch.zeros(4)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    assert flaw_of(tmp_path / "whole.safetensors") is None
    assert flaw("empty.pt", b"") == "is empty"
    for content in (whole[:-1], whole[:20], whole + b"x", b"<!DOCTYPE html><html>not found</html>"):
        assert flaw("damaged.safetensors", content).startswith("is truncated or no safetensors file")
    assert flaw("cut.pt", b"PK\x03\x04") == "is truncated"
    assert flaw("cut.json", b'{"a": ').startswith("is not JSON")


def test_the_program_is_run_by_its_path_and_ends_with_0_for_a_complete_model():
    command = [sys.executable, "scripts/check_checkpoints.py", "assets/miniature"]
    whole = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    assert "Can be run: text-to-video" in whole.stdout


def test_the_program_ends_with_1_for_no_model_and_2_for_a_wrong_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_checkpoints", str(tmp_path / "nothing")])
    assert check_checkpoints.main() == 1
    monkeypatch.setattr(sys, "argv", ["check_checkpoints", str(ROOT / "README.md")])
    with pytest.raises(SystemExit) as stopped:
        check_checkpoints.main()
    assert stopped.value.code == 2 and "root must be the folder that contains transformer/" in capsys.readouterr().err


def test_a_pipeline_is_for_what_its_index_says(tmp_path):
    """The hub's 480p_t2v has i2v in the config.json of its transformer: diffusers' script wrote it there."""
    from hyvideo.models.loading import read_task

    (tmp_path / "transformer").mkdir()
    config = {"_class_name": "HunyuanVideo15Transformer3DModel", "task_type": "i2v"}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    assert read_task(tmp_path, None) == "i2v"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "HunyuanVideo15Pipeline"}))
    assert read_task(tmp_path, None) == read_task(tmp_path, "480p_t2v") == "t2v"
    checkpoints = report(tmp_path)
    assert row_of(checkpoints, "transformer").part.uses == ["t2v"]
    downloads = [row.part.download for row in checkpoints.rows if "community" in row.part.download]
    assert downloads and all("480p_t2v" in download for download in downloads)
    assert "transformer" in lacks(checkpoints, "i2v"), "the one that is there is for the other task"
