"""LoRA files of this project in the programs that `scripts.export` names: all layers load, and every
weight changes as it does here. The tests call these programs' own loaders.

ComfyUI, LightX2V and the program of the authors of HunyuanVideo-1.5 are no packages. For ComfyUI, its names
of layers are recorded here and in test_lora.py.
"""

import copy
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file
from torch import nn

from hyvideo.models.family import family_of
from hyvideo.models.lora import LoraPair, target_modules, with_lora
from hyvideo.models.lora_saving import save_lora
from tests.models.test_lora import changes_by_comfyui
from tests.tiny_wan import write_wan

FILE = "pytorch_lora_weights.safetensors"
BLOCKS, ALL, MIXED, FEW = "blocks", "all layers", "two ranks and alphas", "two layers"


def drawn(transformer, kind, seed=0):
    """Return a LoRA of a transformer."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    family = family_of(transformer)
    names = linear if kind == ALL else target_modules(transformer, [family.target_modules])
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for number, name in enumerate(names[1:3] if kind == FEW else names):
        is_other = kind == MIXED and number % 3 == 1
        rank, alpha = (2, 5.0) if is_other else (4, 3.0)
        out, into = transformer.get_submodule(name).weight.shape
        a = torch.randn(rank, into, generator=generator)
        lora[name] = LoraPair(a, 0.1 * torch.randn(out, rank, generator=generator), alpha)
    return lora


def num_layers(module):
    """Return how many layers have an adapter."""
    return sum(hasattr(each, "lora_A") for each in module.modules())


def merged(transformer):
    """Return the weights after diffusers has added the adapters to them."""
    transformer.fuse_lora()
    transformer.unload_lora()
    return transformer.state_dict()


def assert_changed(found, base, lora, *, count=None):
    """Check all weights of a program against ours."""
    expected = dict(with_lora(base.items(), lora))
    assert found.keys() == expected.keys()
    changed = [name for name in expected if not torch.equal(expected[name], base[name])]
    assert len(changed) == (len(lora) if count is None else count)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    root = write_wan(tmp_path_factory.mktemp("wan"))
    return WanPipeline.from_pretrained(root, local_files_only=True)


@pytest.fixture
def pipeline(wan):
    """A pipeline of Wan with its own transformer."""
    return WanPipeline(**wan.components | {"transformer": copy.deepcopy(wan.transformer)})


@pytest.mark.parametrize("kind", [BLOCKS, ALL, MIXED, FEW])
@pytest.mark.parametrize("form", ["diffusers", "original", "comfyui"])
def test_the_usual_call_of_diffusers_loads_a_folder_into_wan(pipeline, tmp_path, form, kind):
    """Without arguments: `pipeline.load_lora_weights(folder)`, also of a run's lora/."""
    base = copy.deepcopy(pipeline.transformer.state_dict())
    lora = drawn(pipeline.transformer, kind)
    save_lora(lora, tmp_path, form=form)
    pipeline.load_lora_weights(str(tmp_path))
    assert num_layers(pipeline.transformer) == len(lora)
    assert_changed(merged(pipeline.transformer), base, lora)


@pytest.mark.parametrize("kind", [BLOCKS, ALL, MIXED])
def test_the_transformer_of_diffusers_loads_a_folder_with_its_defaults(
    pipeline, transformer, tmp_path, kind
):
    """The call for HunyuanVideo-1.5, whose pipeline has no load_lora_weights."""
    for model in (pipeline.transformer, transformer):
        base = copy.deepcopy(model.state_dict())
        lora = drawn(model, kind)
        save_lora(lora, tmp_path / family_of(model).name)
        model.load_lora_adapter(str(tmp_path / family_of(model).name), use_safetensors=True)
        assert num_layers(model) == len(lora)
        assert_changed(merged(model), base, lora)


@pytest.mark.parametrize("kind", [BLOCKS, ALL, MIXED])
def test_peft_loads_a_folder_and_merges_it(pipeline, transformer, tmp_path, kind):
    from peft import PeftModel

    for model in (pipeline.transformer, transformer):
        base = copy.deepcopy(model.state_dict())
        lora = drawn(model, kind)
        save_lora(lora, tmp_path / family_of(model).name, form="peft")
        wrapped = PeftModel.from_pretrained(model, tmp_path / family_of(model).name)
        assert num_layers(wrapped) == len(lora)
        assert_changed(wrapped.merge_and_unload().state_dict(), base, lora)


def test_two_loras_are_mixed_and_unloaded_in_diffusers(pipeline, tmp_path):
    transformer = pipeline.transformer
    base = copy.deepcopy(transformer.state_dict())
    loras = [drawn(transformer, BLOCKS, seed) for seed in (0, 1)]
    for name, lora in zip("ab", loras):
        save_lora(lora, tmp_path / name)
        pipeline.load_lora_weights(str(tmp_path / name), adapter_name=name)
    pipeline.set_adapters(["a", "b"], [0.5, 0.25])
    pipeline.fuse_lora(adapter_names=["a", "b"])
    pipeline.unload_lora_weights()
    scaled = [
        {name: LoraPair(pair.a, factor * pair.b, pair.alpha) for name, pair in lora.items()}
        for factor, lora in zip((0.5, 0.25), loras)
    ]
    both = dict(with_lora(with_lora(base.items(), scaled[0]), scaled[1]))
    for name, weight in transformer.state_dict().items():
        torch.testing.assert_close(weight, both[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", ["high", "low"])
@pytest.mark.parametrize("form", ["diffusers", "original"])
def test_each_expert_is_loaded_into_its_transformer_in_diffusers(tmp_path, pipeline, form, expert):
    pipeline = WanPipeline(
        **pipeline.components | {"transformer_2": copy.deepcopy(pipeline.transformer)},
        boundary_ratio=0.9,
    )
    models = {"high": pipeline.transformer, "low": pipeline.transformer_2}
    base = copy.deepcopy(pipeline.transformer.state_dict())
    lora = drawn(pipeline.transformer, BLOCKS)
    save_lora(lora, tmp_path, form=form, expert=expert)
    (file,) = tmp_path.glob("*.safetensors")
    options = {"load_into_transformer_2": True} if expert == "low" else {}
    if form == "original":
        options["weight_name"] = file.name
    pipeline.load_lora_weights(str(tmp_path), **options)
    for name, model in models.items():
        changes = lora if name == expert else {}
        assert num_layers(model) == len(changes)
        assert_changed(merged(model) if changes else model.state_dict(), base, changes)


# --- ComfyUI --------------------------------------------------------------------------------------

# of its model of Wan, which has the names of the original checkpoint
COMFYUI_BLOCK = {
    f"{theirs}_attn.{part}": f"{ours}.to_{part if part != 'o' else 'out.0'}"
    for theirs, ours in (("self", "attn1"), ("cross", "attn2"))
    for part in "qkvo"
} | {"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}
COMFYUI_OTHERS = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
}


@pytest.mark.parametrize("kind", [BLOCKS, ALL, MIXED, FEW])
@pytest.mark.parametrize("form", ["original", "comfyui"])
def test_comfyui_changes_all_layers_of_wan(pipeline, tmp_path, form, kind):
    transformer = pipeline.transformer
    lora = drawn(transformer, kind)
    save_lora(lora, tmp_path, form=form)
    layers = COMFYUI_OTHERS | {
        f"blocks.{number}.{theirs}": f"blocks.{number}.{ours}"
        for number in range(transformer.config.num_layers)
        for theirs, ours in COMFYUI_BLOCK.items()
    }
    assert not any(name.endswith(".alpha") for name in load_file(tmp_path / FILE))
    changes = changes_by_comfyui(tmp_path, layers)
    assert len(changes) == len(lora)
    for name, change in changes.items():
        pair = lora[layers[name]]
        torch.testing.assert_close(change, pair.alpha / pair.rank * pair.b @ pair.a)


# --- DiffSynth-Studio -----------------------------------------------------------------------------


def stand_in(monkeypatch, name):
    """Put an empty module in place of a package that DiffSynth imports and does not need here."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__getattr__ = lambda attribute: MagicMock()
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def diffsynth(monkeypatch):
    """DiffSynth's model of Wan, and its pipeline.

    `pip install --no-deps diffsynth==2.1.12 pandas`
    """
    import transformers  # noqa: F401, they look for torchvision

    pytest.importorskip("pandas")
    for name in ("transforms", "transforms.functional", "transforms.v2"):
        stand_in(monkeypatch, f"torchvision.{name}")
    stand_in(monkeypatch, "torchvision")
    stand_in(monkeypatch, "modelscope")
    model = pytest.importorskip("diffsynth.models.wan_video_dit", exc_type=ImportError)
    pipelines = pytest.importorskip("diffsynth.pipelines.wan_video", exc_type=ImportError)
    return model.WanModel, pipelines.WanVideoPipeline


@pytest.mark.parametrize("kind", [BLOCKS, ALL, MIXED, FEW])
@pytest.mark.parametrize("form", ["original", "comfyui"])
def test_diffsynth_loads_a_file_into_wan(diffsynth, pipeline, tmp_path, form, kind, capsys):
    wan_model, wan_pipeline = diffsynth
    transformer = pipeline.transformer
    config = transformer.config
    to_original = family_of(transformer).transformer.to_original
    base = to_original(transformer.state_dict())
    dit = wan_model(
        dim=config.num_attention_heads * config.attention_head_dim,
        in_dim=config.in_channels,
        ffn_dim=config.ffn_dim,
        out_dim=config.out_channels,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        eps=config.eps,
        patch_size=config.patch_size,
        num_heads=config.num_attention_heads,
        num_layers=config.num_layers,
        has_image_input=False,
    )
    dit.load_state_dict(base)
    lora = drawn(transformer, kind)
    save_lora(lora, tmp_path, form=form)
    pipe = wan_pipeline(device="cpu", torch_dtype=torch.float32)
    pipe.dit = dit
    pipe.load_lora(pipe.dit, str(tmp_path / FILE))
    expected = to_original(dict(with_lora(transformer.state_dict().items(), lora)))
    changed = [name for name in expected if not torch.equal(expected[name], base[name])]
    assert len(changed) == len(lora)
    for name, weight in dit.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)
