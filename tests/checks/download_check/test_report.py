import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hyvideo.checks.download_check.report import lines, report
from hyvideo.data.prompts import Request
from hyvideo.models.fit_checks import check_checkpoint
from scripts import check_checkpoints
from tests.forked import ROOT
from tests.tiny_wan import write_wan

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:71f9affa1115\nsize 33306432640\n"
TRANSFORMER = "transformer/480p_t2v/diffusion_pytorch_model.safetensors"
GLYPHS = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt"


def write_original(root):
    """Write the miniature under a released name, with small random encoders for glyphs and
    images.
    """
    from transformers import (
        ByT5Tokenizer,
        SiglipVisionConfig,
        SiglipVisionModel,
        T5Config,
        T5EncoderModel,
    )

    shutil.copytree(
        ROOT / "assets" / "miniature", root, ignore=shutil.ignore_patterns("prompts", "VideoReward")
    )
    shutil.rmtree(root / "transformer" / "miniature_flow_map")
    (root / "transformer" / "miniature").rename(root / "transformer" / "480p_t2v")
    glyphs = T5Config(vocab_size=390, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    glyphs.save_pretrained(root / "text_encoder/byt5-small")
    ByT5Tokenizer().save_pretrained(root / "text_encoder/byt5-small")
    for name in ("assets/color_idx.json", "assets/multilingual_10-lang_idx.json"):
        (root / "text_encoder/Glyph-SDXL-v2" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "text_encoder/Glyph-SDXL-v2" / name).write_text('{"white": 0}')
    state = {
        f"module.text_tower.encoder.{k}": v
        for k, v in T5EncoderModel(glyphs).encoder.state_dict().items()
    }
    (root / GLYPHS).parent.mkdir()
    torch.save({"state_dict": state}, root / GLYPHS)
    vision = SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    SiglipVisionModel(vision).save_pretrained(root / "vision_encoder/siglip/image_encoder")
    (root / "vision_encoder/siglip/feature_extractor").mkdir()
    (root / "vision_encoder/siglip/feature_extractor/preprocessor_config.json").write_text("{}")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A small checkpoint folder in the original layout. Read-only."""
    root = tmp_path_factory.mktemp("complete") / "ckpts"
    write_original(root)
    return root


@pytest.fixture
def ckpts(complete, tmp_path):
    """A copy of the folder for tests that modify it."""
    return shutil.copytree(complete, tmp_path / "ckpts")


def row_of(checkpoints, folder):
    return next(row for row in checkpoints.rows if row.part.folder == folder)


def states(checkpoints):
    return {row.part.folder: row.state for row in checkpoints.rows}


def missing_for(checkpoints, use):
    return [row.part.folder for row in checkpoints.missing_for(use)]


def truncate(path, num_bytes=100):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def write_reward(root, output_dim=1):
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
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 8),
    }
    torch.save(tensors, checkpoint / "model.pth")


def test_a_complete_folder_can_run_everything_it_has_parts_for(complete):
    checkpoints = report(complete)
    for folder in ("transformer/480p_t2v", "vae", "text_encoder/llm"):
        assert states(checkpoints)[folder] == "ok", row_of(checkpoints, folder).problems
    assert checkpoints.has_a_model
    assert not checkpoints.missing_for("t2v")
    assert not checkpoints.missing_for("quoted text")
    assert states(checkpoints)["vision_encoder/siglip"] == "ok"
    assert missing_for(checkpoints, "i2v") == ["transformer/480p_i2v"]
    assert missing_for(checkpoints, "reward") == ["VideoReward"]
    assert (
        row_of(checkpoints, "vae").size
        >= (complete / "vae/diffusion_pytorch_model.safetensors").stat().st_size
    )


def test_the_miniature_is_a_complete_model():
    checkpoints = report(ROOT / "assets" / "miniature")
    assert checkpoints.has_a_model
    assert states(checkpoints)["transformer/miniature"] == "ok"
    assert lines(checkpoints)[-1].startswith("Can run: text-to-video")


def test_an_empty_folder_lists_all_downloads(tmp_path):
    checkpoints = report(tmp_path / "ckpts")
    assert set(states(checkpoints).values()) == {"missing"}
    text = "\n".join(lines(checkpoints))
    target = tmp_path / "ckpts"
    assert (
        'hf download tencent/HunyuanVideo-1.5 --include "transformer/480p_t2v/*" --local-dir '
        f"{target}" in text
    )
    assert f"hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir {target}/text_encoder/llm" in text
    expected = "Can run: nothing. Cannot run: text-to-video (missing: transformer 480p_t2v, VAE"
    assert text.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize("folder", ["transformer/480p_t2v", "vae", "text_encoder/llm"])
def test_a_model_needs_transformer_vae_and_text_encoder(ckpts, folder):
    shutil.rmtree(ckpts / folder)
    checkpoints = report(ckpts)
    assert states(checkpoints)[folder] == "missing"
    assert not checkpoints.has_a_model
    assert missing_for(checkpoints, "t2v") == [folder]


def test_parts_are_checked_separately(ckpts):
    shutil.rmtree(ckpts / "text_encoder" / "byt5-small")
    (ckpts / "vae" / "config.json").unlink()
    checkpoints = report(ckpts)
    found = states(checkpoints)
    assert found["transformer/480p_t2v"] == found["text_encoder/llm"] == "ok"
    assert found["text_encoder/Glyph-SDXL-v2"] == found["vae"] == "incomplete"
    assert row_of(checkpoints, "vae").problems == ("vae has no config.json",)


@pytest.mark.parametrize(
    "change", [truncate, lambda path: path.write_text(POINTER), lambda path: path.write_text("")]
)
def test_a_corrupted_file_is_unusable(ckpts, change):
    for file in (TRANSFORMER, GLYPHS):
        change(ckpts / file)
        row = row_of(report(ckpts), file.rsplit("/", 1)[0].removesuffix("/checkpoints"))
        assert row.state == "unusable"
        assert (
            file in row.problems[0] and "truncated, a git-lfs pointer or not a" in row.problems[0]
        )


def test_a_wrong_shape_is_unusable(ckpts):
    with safe_open(ckpts / TRANSFORMER, framework="pt") as file:
        metadata = file.metadata()  # lists the random tensors that the compact file omits
    tensors = load_file(ckpts / TRANSFORMER)
    tensors["img_in.proj.bias"] = torch.zeros(3)
    save_file(tensors, ckpts / TRANSFORMER, metadata=metadata)
    checkpoints = report(ckpts)
    row = row_of(checkpoints, "transformer/480p_t2v")
    assert row.state == "unusable"
    assert any(
        "'img_in.proj.bias'" in problem and "shape (3,)" in problem for problem in row.problems
    ), row.problems
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
    assert row.state == "unusable"
    assert "model-00002-of-00002.safetensors" in row.problems[0]


def test_an_unsupported_version_is_reported_with_the_reason(ckpts):
    shutil.copytree(ckpts / "transformer/480p_t2v", ckpts / "transformer/720p_i2v_distilled_sparse")
    row = row_of(report(ckpts), "transformer/720p_i2v_distilled_sparse")
    assert row.state == "unusable"
    assert "sparse attention" in row.problems[0]


def test_a_glyph_file_of_another_model_is_unusable(ckpts):
    torch.save({"state_dict": {"head.weight": torch.zeros(2)}}, ckpts / GLYPHS)
    assert states(report(ckpts))["text_encoder/Glyph-SDXL-v2"] == "unusable"


def test_a_truncated_reward_model_is_unusable(ckpts):
    write_reward(ckpts)
    checkpoints = report(ckpts)
    assert not checkpoints.missing_for("reward"), row_of(checkpoints, "VideoReward").problems
    weights = ckpts / "VideoReward/checkpoint-11352/model.pth"
    truncate(weights)
    assert states(report(ckpts))["VideoReward"] == "unusable"


def test_a_reward_model_with_several_outputs_is_unusable(tmp_path):
    write_reward(tmp_path, output_dim=3)
    assert states(report(tmp_path))["VideoReward"] == "unusable"


def test_a_reward_model_with_incomplete_settings_is_unusable(tmp_path):
    write_reward(tmp_path)
    path = tmp_path / "VideoReward" / "model_config.json"
    config = json.loads(path.read_text())
    del config["data_config"]["max_frame_pixels"]
    path.write_text(json.dumps(config))
    row = row_of(report(tmp_path), "VideoReward")
    assert row.state == "unusable" and "max_frame_pixels" in row.problems[0]


def test_the_diffusers_layout_is_recognized_by_its_folders(complete, tmp_path):
    from hyvideo.models.loading import load_transformer, load_vae

    load_transformer(complete, "480p_t2v").save_pretrained(tmp_path / "transformer")
    load_vae(complete).save_pretrained(tmp_path / "vae")
    shutil.copytree(complete / "text_encoder/llm", tmp_path / "text_encoder")
    checkpoints = report(tmp_path)
    assert states(checkpoints)["transformer"] == states(checkpoints)["vae"] == "ok"
    assert missing_for(checkpoints, "t2v") == ["text_encoder", "tokenizer"]
    shutil.copytree(complete / "text_encoder/llm", tmp_path / "tokenizer")
    assert report(tmp_path).has_a_model


def test_missing_files_of_a_wan_folder_are_reported(tmp_path):
    root = write_wan(tmp_path / "wan")
    checkpoints = report(root)
    assert checkpoints.has_a_model
    complete_parts = [row.part.folder for row in checkpoints.rows if row.is_ok]
    assert complete_parts == ["transformer", "vae", "text_encoder", "tokenizer", "scheduler"]
    assert lines(checkpoints)[-1] == (
        "Can run: text-to-video. Cannot run: VideoAlign reward (missing: VideoAlign); CLIPScore "
        "and PickScore (missing: CLIP, PickScore)."
    )
    for folder, file in [
        ("tokenizer", "tokenizer.json"),
        ("vae", "config.json"),
        ("text_encoder", "model.safetensors"),
    ]:
        (root / folder / file).unlink()
        checkpoints = report(root)
        assert not checkpoints.has_a_model
        assert folder in missing_for(checkpoints, "t2v")
        assert any(f"{folder} has no {file}" in line for line in lines(checkpoints))


def test_a_wan_transformer_in_a_folder_with_its_version_name_is_found(tmp_path):
    root = write_wan(tmp_path)
    (root / "model_index.json").unlink()
    (root / "transformer").rename(root / "wan2.1_t2v_1.3b")
    (root / "transformer").mkdir()
    (root / "wan2.1_t2v_1.3b").rename(root / "transformer" / "wan2.1_t2v_1.3b")
    assert check_checkpoint(root, "wan2.1_t2v_1.3b", [Request("a")]) == []
    assert row_of(report(root), "transformer/wan2.1_t2v_1.3b").is_ok
    assert report(root).has_a_model


@pytest.mark.parametrize("name", ["WanVAE_", "AutoencoderKLHunyuanVideo15"])
def test_a_wan_vae_in_another_layout_is_reported_with_the_repository_to_download(tmp_path, name):
    root = write_wan(tmp_path)
    (root / "vae" / "config.json").write_text(json.dumps({"_class_name": name, "z_dim": 16}))
    row = row_of(report(root), "vae")
    assert row.state == "unusable"
    assert (
        f"got _class_name '{name}'. Download it from Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        in row.problems[0]
    )
    assert check_checkpoint(root, None, [Request("a")]) == list(row.problems)


def test_the_name_of_an_empty_wan_folder_selects_the_repository(tmp_path):
    text = "\n".join(lines(report(tmp_path / "wan2.1_t2v_14b")))
    assert "hf download Wan-AI/Wan2.1-T2V-14B-Diffusers" in text
    assert "tencent" not in text and "quoted text" not in text


def test_the_size_of_the_transformer_selects_the_repository(tmp_path):
    write_wan(tmp_path, heads=24, head_dim=6)
    (tmp_path / "vae" / "config.json").unlink()
    assert 'hf download Wan-AI/Wan2.2-TI2V-5B-Diffusers --include "vae/*"' in "\n".join(
        lines(report(tmp_path))
    )


def test_a_pipeline_with_two_transformers_is_not_supported(tmp_path):
    root = write_wan(tmp_path)
    index = json.loads((root / "model_index.json").read_text())
    for absent in (None, [None, None]):
        (root / "model_index.json").write_text(json.dumps(index | {"transformer_2": absent}))
        assert states(report(root))["transformer"] == "ok"
    experts = index | {
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "boundary_ratio": 0.875,
    }
    (root / "model_index.json").write_text(json.dumps(experts))
    row = row_of(report(root), "transformer")
    assert row.state == "unusable"
    assert (
        "also has transformer_2: models with two transformers are not supported" in row.problems[0]
    )
    assert check_checkpoint(root, None, [Request("a")]) == list(row.problems)


def test_the_program_runs_by_its_path_and_exits_with_0_for_a_complete_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_checkpoints.py", str(ROOT / "assets" / "miniature")])
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "check_checkpoints.py"), run_name="__main__")
    assert ended.value.code == 0 and "Can run: text-to-video" in capsys.readouterr().out
    assert sys.path[0] == str(ROOT)  # hyvideo is found without an installation


def test_the_program_exits_with_1_without_a_model_and_with_2_for_invalid_arguments(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["check_checkpoints", str(tmp_path / "nothing")])
    assert check_checkpoints.main() == 1
    monkeypatch.setattr(sys, "argv", ["check_checkpoints", str(ROOT / "README.md")])
    with pytest.raises(SystemExit) as stopped:
        check_checkpoints.main()
    assert (
        stopped.value.code == 2
        and "root must be the folder that contains transformer/" in capsys.readouterr().err
    )
    monkeypatch.setattr(sys, "argv", ["check_checkpoints", "x" * 5000])
    with pytest.raises(SystemExit) as stopped:
        check_checkpoints.main()
    assert stopped.value.code == 2 and "file name too long" in capsys.readouterr().err


def test_model_index_json_determines_the_task(tmp_path):
    """On the hub, the transformer of 480p_t2v has i2v in its config.json, written by diffusers'
    conversion script.
    """
    from hyvideo.models.loading import read_task

    (tmp_path / "transformer").mkdir()
    config = {"_class_name": "HunyuanVideo15Transformer3DModel", "task_type": "i2v"}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    assert read_task(tmp_path, None) == "i2v"
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "HunyuanVideo15Pipeline"})
    )
    assert read_task(tmp_path, None) == read_task(tmp_path, "480p_t2v") == "t2v"
    checkpoints = report(tmp_path)
    assert row_of(checkpoints, "transformer").part.uses == ["t2v"]
    downloads = [row.part.download for row in checkpoints.rows if "community" in row.part.download]
    assert downloads and all("480p_t2v" in download for download in downloads)
    assert "i2v" not in checkpoints.uses, "the transformer is for the other task"
