"""Every kind of LoRA file that people bring has the change of the weights that its writer meant, or is
refused with the cause and a way out.
"""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyvideo.loading.saved_policy import read_saved_lora
from hyvideo.models import lora_files
from hyvideo.models.hunyuan_video15.names import transformer_to_original
from hyvideo.models.lora import Difference, LoraPair, add_lora, fit_lora, pairs_of, with_lora
from hyvideo.models.lora_files import check_expert, expert_of, read_lora
from hyvideo.models.lora_saving import save_lora
from tests.models.test_lora import change_of
from tests.models.wan.tiny import inputs, installed, tiny

RANK = 4
MODULE = "blocks.0.attn1.to_q"  # in the original's layout: blocks.0.self_attn.q
generator = torch.Generator().manual_seed(0)
A, B = torch.randn(RANK, 72, generator=generator), torch.randn(72, RANK, generator=generator)


def pair(module, a="lora_A.weight", b="lora_B.weight", factor=1.0):
    return {f"{module}.{a}": A.clone(), f"{module}.{b}": factor * B}


def kohya(module, alpha=None):
    tensors = pair(module, "lora_down.weight", "lora_up.weight")
    return tensors if alpha is None else tensors | {f"{module}.alpha": torch.tensor(float(alpha))}


@pytest.fixture
def read(tmp_path):
    """A function that writes tensors, header and files beside, and reads the LoRA."""

    def call(tensors, header=None, *, name="my_lora.safetensors", config=None, expert=None):
        save_file(tensors, tmp_path / name, metadata=header)
        if config is not None:
            (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return read_lora(tmp_path / name, expert)

    return call


def strength(lora, module=MODULE):
    """Return by how much more than B A a module's weight changes."""
    change = change_of(lora[module])
    factor = (change * (B @ A)).sum() / (B @ A).square().sum()
    torch.testing.assert_close(change, factor * (B @ A))
    return factor.item()


# --- K1: the strength stands beside the tensors ---------------------------------------------------


def json_header(**values):
    return {"lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in values.items()})}


DOTTED, FLAT = f"transformer.{MODULE}", "lora_unet_blocks_0_self_attn_q"


@pytest.mark.parametrize(
    "tensors, header, factor",
    [
        (pair(DOTTED), None, 1.0),
        (pair(DOTTED), {"lora_alpha": "8", "rank": "4"}, 2.0),
        (pair(DOTTED), {"network_alpha": "8"}, 2.0),  # LightX2V, SGLang
        (pair(DOTTED), {"alpha": "8.0", "format": "pt"}, 2.0),
        (pair(DOTTED), {"transformer.lora_alpha": "8", "transformer.r": "4"}, 2.0),  # SimpleTuner
        (pair(DOTTED), json_header(r=4, lora_alpha=8), 2.0),  # diffusers
        (pair(DOTTED), json_header(r=4, lora_alpha=8, use_rslora=True), 4.0),
        (pair(DOTTED), json_header(r=4, lora_alpha=4, alpha_pattern={"attn1.to_q": 8}), 2.0),
        (pair(DOTTED), {"lora_config": '{"r": 4, "lora_alpha": 8}'}, 2.0),
        (pair(DOTTED), {"lora_alpha": "8", "use_rslora": "True"}, 4.0),
        (kohya(FLAT), {"ss_network_alpha": "8", "ss_network_dim": "4"}, 2.0),
        (kohya(FLAT, 8), {"ss_network_alpha": "8.0", "ss_network_dim": "4"}, 2.0),
        # of sd-scripts' resizing, which gives each module a rank of its own
        (kohya(FLAT, 8), {"ss_network_alpha": "Dynamic", "ss_network_dim": "Dynamic"}, 2.0),
        # of musubi-tuner's converter: alpha is in the matrices, and the header is kept
        (pair(DOTTED), {"ss_network_alpha": "8", "ss_network_dim": "4"}, 1.0),
        (kohya(FLAT, 4), {"ss_network_alpha": "8", "ss_network_dim": "4"}, 1.0),
        (kohya(DOTTED, 8), {"lora_alpha": "8"}, 2.0),
    ],
)  # fmt: skip
def test_the_strength_is_read_from_where_its_writer_put_it(read, tensors, header, factor):
    assert strength(read(tensors, header)) == pytest.approx(factor)


def test_the_strength_of_a_header_doubles_the_change_of_the_velocity(read):
    """Effect on the model's output, not only on names."""
    added, merged = installed(), installed()
    add_lora(added, read(pair(DOTTED), {"lora_alpha": "8"}))
    with torch.no_grad():
        base = merged(**inputs())
        merged.get_submodule(MODULE).weight += 2 * B @ A
        torch.testing.assert_close(added(**inputs()), merged(**inputs()), rtol=1e-4, atol=1e-4)
        assert (merged(**inputs()) - base).norm() > 0.01 * base.norm()


@pytest.mark.parametrize(
    "tensors, header, named",
    [
        (pair(DOTTED), {"lora_alpha": "eight"}, "eight"),
        (kohya(FLAT), {"ss_network_alpha": "Dynamic"}, "Dynamic"),
        (pair(DOTTED), {"lora_alpha": "8", "network_alpha": "2"}, "network_alpha"),
        (pair(DOTTED), {"lora_alpha": "8", "rank": "16"}, "rank 16"),
        (kohya(DOTTED, 2), {"lora_alpha": "8"}, "2.*8"),
        (kohya(FLAT, 2), {"ss_network_alpha": "8"}, "8.*2"),
        (pair(DOTTED), {"lora_alpha": "2"} | json_header(lora_alpha=8), "8.*2|2.*8"),
        (pair(DOTTED), {"lora_adapter_metadata": "[]"}, "lora_adapter_metadata"),
        (pair(DOTTED) | {f"{DOTTED.replace('to_q', 'to_k')}.alpha": torch.tensor(8.0)}, None, "to_k"),
    ],
)  # fmt: skip
def test_a_strength_that_is_no_number_or_contradicts_another_is_refused(
    read, tensors, header, named
):
    with pytest.raises(ValueError, match=named):
        read(tensors, header)


PEFT = f"base_model.model.{MODULE}"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "renamed.safetensors"])
@pytest.mark.parametrize(
    "config, factor",
    [
        ({"r": 4, "lora_alpha": 8}, 2.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"r": 8, "lora_alpha": 8, "rank_pattern": {"to_q": 4}, "alpha_pattern": {"to_q": 6}}, 1.5),
    ],
)
def test_the_config_of_peft_is_read_beside_any_file_name(read, name, config, factor):
    assert strength(read(pair(PEFT), name=name, config=config)) == pytest.approx(factor)


def test_a_file_of_peft_without_its_config_is_refused(read):
    with pytest.raises(ValueError, match="adapter_config.json"):
        read(pair(PEFT))


def test_a_file_of_diffusion_pipe_needs_no_config(read):
    """It has alpha equal to the rank, and people share the file alone."""
    tensors = pair("diffusion_model.blocks.0.self_attn.q")
    assert strength(read(tensors, name="adapter_model.safetensors")) == 1.0


def test_a_header_that_contradicts_the_config_of_peft_is_refused(read):
    with pytest.raises(ValueError, match="adapter_config.json"):
        read(pair(PEFT), {"lora_alpha": "2"}, config={"r": 4, "lora_alpha": 8})


def test_every_setting_of_peft_is_listed():
    from peft import LoraConfig

    listed = [name for settings in lora_files._TABLE["settings"].values() for name in settings]
    assert sorted(listed) == sorted(LoraConfig.__dataclass_fields__)


@pytest.mark.parametrize("where", ["config", "header"])
@pytest.mark.parametrize(
    "setting, value, way_out",
    [
        ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "pissa_niter_4", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "corda", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "loftq", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "lora_ga", "path_initial_model_for_weight_conversion"),
        ("use_dora", True, "merge_and_unload"),
        ("bias", "lora_only", "merge_and_unload"),
        ("modules_to_save", ["proj_out"], "merge_and_unload"),
        ("peft_type", "LOHA", "merge_and_unload"),
        ("use_qalora", True, "merge_and_unload"),
        ("layer_replication", [[0, 1]], "merge_and_unload"),
        ("a_setting_of_a_later_peft", True, "merge_and_unload"),
    ],
)
def test_a_setting_that_changes_the_meaning_is_refused_by_its_name(
    read, where, setting, value, way_out
):
    config = {"r": 4, "lora_alpha": 8, setting: value}
    with pytest.raises(ValueError, match=f"(?s){setting}.*{way_out}"):
        if where == "config":
            read(pair(PEFT), config=config)
        else:
            read(pair(DOTTED), json_header(**config))


def test_all_settings_that_peft_writes_by_default_are_accepted(read):
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["to_q"]).to_dict()
    assert len(config) > 30
    config["target_modules"] = ["to_q"]
    assert strength(read(pair(PEFT), config=config)) == 2.0
    for name in (True, "gaussian", "orthogonal", "eva"):
        assert strength(read(pair(PEFT), config=config | {"init_lora_weights": name})) == 2.0


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 3},
        {"lora_alpha": 3, "use_rslora": True},
        {"lora_alpha": 3, "rank_pattern": {"to_k": 2}, "alpha_pattern": {r"^blocks.1.*to_q": 7}},
        {"lora_alpha": 3, "lora_bias": True},
        {"lora_alpha": 3, "init_lora_weights": "orthogonal"},
        {"lora_alpha": 3, "init_lora_weights": "pissa"},
    ],
)
def test_a_folder_of_peft_changes_the_weights_as_peft_does(tmp_path, settings):
    """PiSSA by peft's conversion; without it, it is refused."""
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "net.2"], **settings)
    model = get_peft_model(tiny(), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = config.init_lora_weights
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    options = {}
    if settings.get("init_lora_weights") == "pissa":
        model.peft_config["default"].init_lora_weights = "pissa"
        model.save_pretrained(tmp_path / "unconverted")
        with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion"):
            read_lora(tmp_path / "unconverted")
        options = {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
    model.save_pretrained(tmp_path / "saved", **options)
    theirs = PeftModel.from_pretrained(tiny(), tmp_path / "saved").merge_and_unload().state_dict()
    base = tiny().state_dict()
    ours = dict(with_lora(base.items(), read_lora(tmp_path / "saved")))
    changed = [name for name, weight in ours.items() if not weight.equal(base[name])]
    assert len(changed) == (20 if settings.get("lora_bias") else 10)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


# --- K2: two names of one thing -------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors, named",
    [
        (
            pair("blocks.0.attn1.to_q", "lora_A.default.weight", "lora_B.default.weight")
            | pair("blocks.0.attn1.to_q", "lora_A.old.weight", "lora_B.old.weight", 2.0),
            "default, old",
        ),
        (pair(MODULE) | pair(f"transformer.{MODULE}"), f"{MODULE}.*transformer.{MODULE}"),
        (pair(MODULE) | pair("diffusion_model.blocks.0.self_attn.q"), MODULE),
        (kohya(FLAT) | kohya("lora_unet__blocks_0_self_attn_q"), FLAT),
        (pair(MODULE) | kohya(MODULE), "lora_A.*lora_down"),
    ],
)
def test_two_tensors_for_one_are_refused(read, tensors, named):
    with pytest.raises(ValueError, match=named):
        read(tensors)


# --- K8: the same content in another spelling -----------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        MODULE,
        "blocks.0.self_attn.q",
        f"transformer.{MODULE}",
        "diffusion_model.blocks.0.self_attn.q",
        "model.diffusion_model.blocks.0.self_attn.q",
        f"base_model.model.{MODULE}",
        f"transformer.base_model.model.{MODULE}",  # SimpleTuner
        f"base_model.model.transformer.{MODULE}",
        "pipe.dit.blocks.0.self_attn.q",  # DiffSynth-Studio, with its prefix kept
        f"module.{MODULE}",
        f"_orig_mod.{MODULE}",
        f"module._orig_mod.transformer.{MODULE}",
        "transformer.blocks.0._orig_mod.attn1.to_q",
        "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.attn1.to_q",
        "lora_unet_blocks_0_self_attn_q",
        "lora_unet__blocks_0_cross_attn_q".replace("cross", "self"),  # VideoX-Fun
        "lora_unet__orig_mod_blocks_0_self_attn_q",
        "lora_unet_blocks_0__orig_mod_self_attn_q",
        "lora_unet_blocks_0.self_attn.q",  # of a converter, with some dots kept
        "lora_transformer_blocks_0_attn1_to_q",  # OneTrainer
        "lycoris_blocks_0_attn1_to_q",  # LyCORIS, SimpleTuner
        "lycoris_blocks_0_self_attn_q",
        "lora_unet_blocks_0_attn1_to_q",
    ],
)
@pytest.mark.parametrize(
    "sides",
    [
        ("lora_A", "lora_B"),
        ("lora_down", "lora_up"),
        ("lora.down", "lora.up"),
        ("lora_A.default", "lora_B.default"),
    ],
)
def test_a_module_is_found_at_the_end_of_a_name(read, name, sides):
    tensors = pair(name, *(f"{side}.weight" for side in sides))
    lora = read(tensors, {"lora_alpha": "8"})
    assert list(lora) == [MODULE] and strength(lora) == 2.0


@pytest.mark.parametrize(
    "tensors, named",
    [
        (pair(f"student.{MODULE}"), "student"),
        (pair(f"transformer.student.{MODULE}"), "transformer.student"),
        (kohya("lora_unet_student_blocks_0_self_attn_q"), "student"),
        (pair(MODULE) | pair("text_encoder.encoder.layers.0.q"), "text_encoder"),
        (kohya(FLAT) | kohya("lora_te1_text_model_encoder_layers_0_q"), "lora_te1"),
        (pair(MODULE) | pair("transformer.blocks.0.attn1.to_what"), "to_what"),
        (kohya("lora_unet_input_blocks_4_1_proj_in"), "lora_unet_input_blocks_4_1_proj_in"),
    ],
)
def test_what_is_not_known_in_a_name_is_named(read, tensors, named):
    with pytest.raises(ValueError, match=named):
        read(tensors)


@pytest.mark.parametrize(
    "ends, method",
    [
        (["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"], "DoRA"),
        (["lora_down.weight", "lora_up.weight", "dora_scale"], "DoRA"),
        (["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"], "LoHa"),
        (["lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"], "LoKr"),
        (["oft_blocks", "alpha"], "OFT"),
        (["ia3_l"], "IA3"),
        (["vera_lambda_b", "vera_lambda_d"], "VeRA"),
        (["lora_A", "lora_B", "lora_E", "ranknum"], "AdaLoRA"),
        (["lora_down.weight", "lora_up.weight", "lora_mid.weight"], "Tucker"),
        (["lora_A.weight", "lora_B.weight", "base_layer.weight"], "base model"),
        (["modules_to_save.weight"], "modules_to_save"),
    ],
)
def test_another_method_is_named(read, ends, method):
    with pytest.raises(ValueError, match=method):
        read({f"{MODULE}.{end}": torch.ones(4, 4) for end in ends})


FOREIGN = [
    ["transformer.blocks.0.attn2.add_k_proj", "transformer.condition_embedder.image_embedder.ff.net.2"],
    ["diffusion_model.blocks.0.cross_attn.k_img", "diffusion_model.img_emb.proj.3"],
    ["lora_unet_blocks_0_cross_attn_v_img", "lora_unet_img_emb_proj_1"],
]  # fmt: skip


@pytest.mark.parametrize("names", FOREIGN)
def test_parts_of_an_image_branch_are_left_out_with_one_line_in_every_spelling(read, names):
    prefix = "lora_unet_blocks_0_attn1_to_q" if "lora_unet" in names[0] else MODULE
    tensors = pair(prefix) | pair(names[0]) | pair(names[1])
    if "lora_unet" not in names[0]:
        norm = "attn2.norm_added_k" if "attn2" in names[0] else "cross_attn.norm_k_img"
        tensors[f"blocks.0.{norm}.diff"] = torch.ones(72)
    with pytest.warns(UserWarning, match="left out") as caught:
        lora = read(tensors)
        fit_lora(tiny(), lora)
    assert len(caught) == 1 and list(lora) == [MODULE] and strength(lora) == 1.0


# --- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "high, low, header",
    [
        (DOTTED, f"transformer_2.{MODULE}", {
            "lora_adapter_metadata": json.dumps({
                "transformer.r": 4, "transformer.lora_alpha": 8,
                "transformer_2.r": 4, "transformer_2.lora_alpha": 12,
            })}),
        (f"pipe.dit.{MODULE}", f"pipe.dit2.{MODULE}", None),
        ("high_noise_model.blocks.0.self_attn.q", "low_noise_model.blocks.0.self_attn.q", None),
    ],
)  # fmt: skip
def test_each_expert_takes_its_half_of_a_file_with_its_own_strength(
    read, tmp_path, high, low, header
):
    factors = (2.0, 3.0) if header else (1.0, 1.0)
    tensors = pair(high) | pair(low, factor=5.0)
    assert strength(read(tensors, header, expert="high")) == pytest.approx(factors[0])
    assert strength(read(tensors, header, expert="low")) == pytest.approx(5 * factors[1])
    for expert in ("high", "low"):
        check_expert(tmp_path / "my_lora.safetensors", expert)
    with pytest.raises(ValueError, match="two experts"):
        read(tensors, header)


@pytest.mark.parametrize(
    "name, module, header, stated",
    [
        ("my_high_noise.safetensors", DOTTED, None, "high"),
        ("Wan22-LowNoise-style.safetensors", DOTTED, None, "low"),
        ("wan2.2_i2v_A14b_low_noise_lora_rank64.safetensors", DOTTED, None, "low"),
        ("STYLE_I2V_14B_HIGH.safetensors", DOTTED, None, "high"),
        ("high_noise/epoch-4.safetensors", DOTTED, None, "high"),  # DiffSynth-Studio
        ("high_noise/pytorch_lora_weights.safetensors", DOTTED, None, "high"),
        ("style.safetensors", DOTTED, {"expert": "low"}, "low"),
        ("high_noise.safetensors", DOTTED, {"expert": "low"}, "low"),  # the header is surer
        ("style.safetensors", f"transformer_2.{MODULE}", None, "low"),
        ("style.safetensors", DOTTED, None, None),
        ("high_and_low_noise.safetensors", DOTTED, None, None),
        ("highlights.safetensors", DOTTED, None, None),
        ("slow_motion.safetensors", DOTTED, None, None),
    ],
)
def test_a_file_that_says_the_other_expert_is_refused(tmp_path, name, module, header, stated):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    save_file(pair(module), file, metadata=header)
    for expert in ("high", "low"):
        if stated in (None, expert):
            check_expert(file, expert)
        else:
            with pytest.raises(ValueError, match="(?s)base_lora_path.*ignore_lora_expert"):
                check_expert(file, expert, setting="base_lora_path")
    check_expert(file, None)  # a model of a single transformer


def test_a_damaged_file_is_one_sentence_for_each_expert(tmp_path):
    """Before anything asks its header for the expert."""
    (tmp_path / "my_low_noise.safetensors").write_bytes(b"12345678")
    for expert in ("high", "low", None):
        with pytest.raises(ValueError, match="truncated"):
            read_saved_lora(tmp_path / "my_low_noise.safetensors", expert)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_lora_of_the_other_expert_is_read_if_the_setting_says_so(tmp_path, ignore):
    save_file(pair(DOTTED), tmp_path / "my_low_noise.safetensors", {"lora_alpha": "8"})
    if ignore:
        lora = read_saved_lora(tmp_path / "my_low_noise.safetensors", "high", ignore_expert=True)
        assert strength(lora) == 2.0
        return
    with pytest.raises(ValueError, match="ignore_lora_expert"):
        read_saved_lora(tmp_path / "my_low_noise.safetensors", "high")


def test_a_folder_with_a_single_file_of_any_name_is_read(tmp_path):
    save_file(pair(DOTTED), tmp_path / "style.safetensors")
    assert strength(read_lora(tmp_path)) == 1.0
    save_file(pair(DOTTED), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors, style.safetensors"):
        read_lora(tmp_path)


def test_the_name_of_a_file_does_not_decide_its_expert(tmp_path):
    """A LoRA of a single transformer may have any name."""
    save_file(pair(DOTTED), tmp_path / "my_low_noise.safetensors")
    assert expert_of(tmp_path / "my_low_noise.safetensors") is None


# --- changes of whole parameters ------------------------------------------------------------------


def test_a_bias_beside_b_is_scaled_as_in_peft(read):
    tensors = pair(DOTTED) | {f"{DOTTED}.lora_B.bias": torch.arange(72.0)}
    lora = read(tensors, {"lora_alpha": "8"})
    torch.testing.assert_close(lora[f"{MODULE}.bias"].tensor, 2 * torch.arange(72.0))
    merged = dict(with_lora(tiny().state_dict().items(), lora))
    bias = tiny().state_dict()[f"{MODULE}.bias"]
    torch.testing.assert_close(merged[f"{MODULE}.bias"], bias + 2 * torch.arange(72.0))


def test_a_lora_of_a_convolution_changes_its_whole_weight(read):
    """As LyCORIS' LoCon and peft save the patch embedding's."""
    weight = tiny().state_dict()["patch_embedding.weight"]
    a, b = torch.randn(2, *weight.shape[1:]), torch.randn(72, 2, 1, 1, 1)
    name = "lycoris_patch_embedding"
    tensors = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}
    lora = read(tensors | {f"{name}.alpha": torch.tensor(4.0)})
    x = torch.randn(1, weight.shape[1], *weight.shape[2:])
    change = torch.nn.functional.conv3d(torch.nn.functional.conv3d(x, a), b)
    found = torch.nn.functional.conv3d(x, lora["patch_embedding.weight"].tensor)
    torch.testing.assert_close(found, 4.0 / 2 * change, rtol=1e-4, atol=1e-4)
    fit_lora(tiny(), lora)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lycoris_"])
def test_a_file_of_differences_only_changes_the_base_weights(read, prefix):
    """As ComfyUI's full_diff and LyCORIS' full write."""
    names = {
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "blocks.0.self_attn.norm_q.w_norm": "blocks.0.attn1.norm_q.weight",
        "blocks.1.diff_m": "blocks.1.scale_shift_table",
        "head.diff_m": "scale_shift_table",
        "head.head.diff": "proj_out.weight",
        "head.head.diff_b": "proj_out.bias",
    }
    weights = tiny().state_dict()
    changes = {name: torch.randn(weights[ours].shape) for name, ours in names.items()}
    spelled = {}
    for name, change in changes.items():
        module, _, end = name.rpartition(".")
        if prefix == "lycoris_":
            module = module.replace(".", "_")
        spelled[f"{prefix}{module}.{end}"] = change
    lora = read(spelled)
    assert not pairs_of(lora)
    changed = tiny()
    add_lora(changed, lora, scale=0.5)
    for name, ours in names.items():
        torch.testing.assert_close(changed.state_dict()[ours], weights[ours] + 0.5 * changes[name])


def test_a_shape_of_comfyui_is_ignored_if_it_is_that_of_the_change(read):
    weight = tiny().state_dict()["patch_embedding.weight"]
    tensors = {"diffusion_model.patch_embedding.diff": torch.randn_like(weight)}
    shape = torch.tensor(weight.shape)
    lora = read(tensors | {"diffusion_model.patch_embedding.reshape_weight": shape})
    assert list(lora) == ["patch_embedding.weight"]
    shape = shape + torch.tensor([0, 16, 0, 0, 0])
    with pytest.raises(ValueError, match="another model"):
        read(tensors | {"diffusion_model.patch_embedding.reshape_weight": shape})


# --- HunyuanVideo-1.5 in ComfyUI's layout ---------------------------------------------------------


@pytest.mark.parametrize(
    "joined",
    [
        "lora_unet_double_blocks_0_img_attn_qkv",  # musubi-tuner's converter for ComfyUI
        "diffusion_model.double_blocks.0.img_attn_qkv",
        "diffusion_model.double_blocks.0.img_attn.qkv",
        "lycoris_double_blocks_0_img_attn_qkv",
    ],
)
def test_joined_queries_keys_and_values_are_three_changes(transformer, read, joined):
    other = (
        "double_blocks.1.txt_mlp.0" if "img_attn.qkv" in joined else "double_blocks.1.txt_mlp.fc1"
    )
    if "." not in joined:
        other = joined.split("double")[0] + other.replace(".", "_")
    generator = torch.Generator().manual_seed(2)
    width = transformer.get_submodule("transformer_blocks.0.attn.to_q").in_features
    a, b = (torch.randn(*shape, generator=generator) for shape in ((6, width), (3 * width, 6)))
    out, into = transformer.get_submodule("transformer_blocks.1.ff_context.net.0.proj").weight.shape
    tensors = {
        f"{joined}.lora_down.weight": a,
        f"{joined}.lora_up.weight": b,
        f"{joined}.alpha": torch.tensor(9.0),
        f"{other}.lora_down.weight": torch.randn(2, into, generator=generator),
        f"{other}.lora_up.weight": torch.randn(out, 2, generator=generator),
    }
    lora = read(tensors)
    expected = (9.0 / 6 * b @ a).chunk(3)
    for part, change in zip("qkv", expected):
        torch.testing.assert_close(change_of(lora[f"transformer_blocks.0.attn.to_{part}"]), change)
    assert lora.keys() - {f"transformer_blocks.0.attn.to_{part}" for part in "qkv"} == {
        "transformer_blocks.1.ff_context.net.0.proj"
    }


def test_every_parameter_of_both_families_is_found_in_every_layout(transformer):
    """Flat names are unambiguous."""
    from hyvideo.models.hunyuan_video15.names import LORA_NAMES as HUNYUAN
    from hyvideo.models.wan.settings import LORA_NAMES as WAN
    from hyvideo.models.wan.settings import transformer_to_original as wan_to_original

    for names, state, to_original in (
        (HUNYUAN, transformer.state_dict(), transformer_to_original),
        (WAN, tiny().state_dict(), wan_to_original),
    ):
        for name in state:
            for is_flat, spelled in ((False, name), (True, name.replace(".", "_"))):
                found = names.find(spelled, is_flat=is_flat)
                assert (found.parameter, found.before, found.is_diffusers) == (name, "", True)
        for name, tensor in to_original(state).items():
            for is_flat, spelled in ((False, name), (True, name.replace(".", "_"))):
                found = names.find(spelled, is_flat=is_flat)
                if not found.is_diffusers:  # a few have the same name
                    assert found.parameter == name and found.before == ""
                    assert names.to_diffusers({name: tensor}).keys() <= state.keys()


# --- what a run of this project wrote -------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_a_folder_of_an_earlier_run_is_read(tmp_path, prefix):
    """Earlier runs wrote names and settings without `transformer.`"""
    lora = {MODULE: LoraPair(A, B, 8.0), "blocks.0.norm2.bias": Difference(torch.zeros(72))}
    save_lora(lora, tmp_path)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    assert all(name.startswith("transformer.") for name in tensors)
    header = json.dumps({f"{prefix}r": 4, f"{prefix}lora_alpha": 8})
    tensors = {prefix + name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file(tensors, file, metadata={"lora_adapter_metadata": header})
    again = read_lora(tmp_path)
    assert strength(again) == 2.0 and again.keys() == lora.keys()


def test_a_file_of_this_project_needs_no_warning(tmp_path):
    save_lora({MODULE: LoraPair(A, B, 8.0)}, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strength(read_lora(tmp_path)) == 2.0
