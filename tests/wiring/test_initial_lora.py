"""A run that starts from a LoRA: its frozen weights, its checkpoints and the evaluation of its base
model have the changes of this LoRA, also of norms and biases.
"""

import json
from argparse import Namespace

import pytest
import torch

from hyvideo.generation.policy_scores import Evaluator
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import Difference, LoraPair, differences_of, pairs_of, with_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.trainer import Trainer
from hyvideo.training.rewards import make_async_scorer
from scripts import evaluate
from tests.shallow import write_trained
from tests.test_trainer import Redness

CPU = torch.device("cpu")
RANK, ALPHA = 2, 6.0
ADAPTED = [
    f"transformer_blocks.{block}.attn.{part}" for block in (0, 1) for part in ("to_q", "to_v")
]
CHANGED = ("proj_out.bias", "transformer_blocks.1.attn.norm_q.weight")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("shallow") / "ckpts")


@pytest.fixture(scope="module")
def base(root):
    """Weights of the base model by name."""
    return load_transformer(root, "miniature").state_dict()


@pytest.fixture(scope="module")
def lora(base):
    generator = torch.Generator().manual_seed(41)

    def draw(*shape):
        return 0.3 * torch.randn(shape, generator=generator)

    pairs = {}
    for name in ADAPTED:
        out, into = base[f"{name}.weight"].shape
        pairs[name] = LoraPair(draw(RANK, into), draw(out, RANK), ALPHA)
    return pairs | {name: Difference(draw(*base[name].shape)) for name in CHANGED}


@pytest.fixture
def config(distinct, root, lora, tmp_path):
    save_lora(lora, tmp_path / "start")
    return distinct.with_settings(
        pretrained_model_root=root,
        random_weights=False,
        pretrained_lora_path=str(tmp_path / "start"),
        lora_rank=RANK,
        lora_alpha=ALPHA,
        log_num_videos=0,
    )


def test_the_frozen_weights_and_the_lora_of_a_checkpoint_have_the_changes_of_the_file(
    config, mesh, base, lora
):
    policy = Trainer(config, mesh, CPU, scorers={"test": Redness()}).run.policy
    frozen = {
        name.replace(".base_layer.", "."): weight
        for name, weight in policy.transformer.state_dict().items()
        if ".lora_" not in name
    }
    expected = dict(with_lora(base.items(), differences_of(lora)))
    assert all(not torch.equal(expected[name], base[name]) for name in CHANGED)
    assert frozen.keys() == expected.keys()
    assert all(torch.equal(frozen[name], weight) for name, weight in expected.items())
    saved = policy.lora()
    assert saved.keys() == lora.keys()
    for name, difference in differences_of(lora).items():
        assert torch.equal(saved[name].tensor, difference.tensor)
    for name, pair in pairs_of(lora).items():
        assert torch.equal(saved[name].a, pair.a) and torch.equal(saved[name].b, pair.b)


def test_an_evaluated_base_model_has_the_weights_of_the_policy_before_its_first_update(
    config, mesh, tmp_path
):
    """A LoRA that is named, with its scale, takes the place of the run's."""
    config = config.with_settings(validation_steps=1, validation_repeats=1)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.validate()
    scores = json.loads((trainer.output_dir / "samples/000000/scores.json").read_text())
    expected = pytest.approx([entry["reward"] for entry in scores], rel=1e-4)
    evaluator = Evaluator(config)
    evaluator.scorer = make_async_scorer(config, CPU, {"test": Redness()})
    found = evaluator.policies({"base": None}, tmp_path / "base")["base"]
    options = Namespace(
        checkpoint_path=None,
        lora_path=tmp_path / "start",
        lora_scale=0.0,
        videos=None,
        out=tmp_path / "without",
    )
    without, *_ = evaluate.evaluate(options, config, evaluator)
    evaluator.close()
    assert [entry["reward"] for entry in without.videos] != expected
    assert [entry["reward"] for entry in found.videos] == expected
