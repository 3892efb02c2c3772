"""What a run trained is sampled with the same weights: experts in the precision in which the run
stored them, and the encoders away.
"""

import pytest
import torch

from hyvideo.checkpoints.format import LORA
from hyvideo.data.prompts import Request
from hyvideo.generation.generation import Source
from hyvideo.generation.policy_scores import Evaluator, LatentStore
from hyvideo.loading import model_setup
from hyvideo.loading.model_setup import load_encoder, place_transformers
from hyvideo.models.fp8 import Fp8Linear
from hyvideo.models.placement import Placements
from hyvideo.models.wan import tiny
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.trainer import Trainer
from tests.test_trainer import CPU, Redness
from tests.training.test_expert_training import PROMPTS, SETTINGS, VERSION

FP8 = {"base_weight_dtype": "fp8", "partner_weight_dtype": "fp8"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts") / "ckpts"
    tiny.write(root, VERSION, num_heads=2, prompts=PROMPTS)
    return root


@pytest.fixture
def config(tiny_config, root, tmp_path):
    csv = tmp_path / "prompts.csv"
    csv.write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    settings = SETTINGS | {"dtype": "bf16", "max_steps": 1, "learning_rate": 0.1}
    return tiny_config.with_settings(
        **settings, pretrained_model_root=str(root), prompts_csv=str(csv)
    )


def sampled(pipeline, encoder, schedule):
    noise = torch.randn(1, *pipeline.latent_shape(9, 32, 32), generator=torch.manual_seed(0))
    return pipeline.sample_ode(encoder([Request(PROMPTS[0])]), noise, schedule)


@pytest.mark.parametrize("precision", [{}, FP8], ids=["bf16", "fp8"])
def test_a_checkpoint_is_sampled_as_its_run_validates_it(config, mesh, precision):
    pytest.importorskip("torchao")
    config = config.with_settings(**precision)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    models = trainer.run
    schedule = config.sampling.schedule()
    encoder, vae = load_encoder(trainer.config, CPU)
    expected = sampled(models.pipeline, encoder, schedule)
    (checkpoint,) = (trainer.output_dir / "checkpoints").glob("0*")

    def of(source, settings, offloading="none"):
        changed = trainer.config.with_settings(**settings)
        source.check(changed.model)
        placements = Placements.of_sampling(offloading)
        kinds = frozenset({"text"})
        pipeline = source.load(changed, CPU, encoder, vae, kinds, placements=placements)
        place_transformers(pipeline, placements, CPU)
        for transformer in pipeline.transformers:
            is_stored = any(isinstance(layer, Fp8Linear) for layer in transformer.modules())
            assert is_stored == (settings["base_weight_dtype"] == "fp8")
        return sampled(pipeline, encoder, schedule)

    plain = {"base_weight_dtype": "bf16", "partner_weight_dtype": "bf16"}
    other = FP8 if not precision else plain
    assert torch.equal(of(Source(checkpoint), plain | precision), expected)
    assert torch.equal(of(Source(lora=checkpoint / LORA), plain | precision, "group"), expected)
    assert not torch.equal(of(Source(checkpoint), other), expected)
    assert not torch.equal(of(Source(), plain | precision), expected)


def test_encoders_are_released_before_an_evaluation_loads_the_transformer(
    config, tmp_path, monkeypatch
):
    config = config.with_settings(
        valid_video_csv=config.data.prompts_csv, precompute_conditions=False, validation_steps=2
    )
    evaluator = Evaluator(config)
    evaluator.scorer = None
    encoder = evaluator._encoder_and_vae[0]
    loaded = model_setup.loaded_transformer
    seen = []

    def load(*arguments, **options):
        seen.append(dict(encoder._loaded))
        return loaded(*arguments, **options)

    monkeypatch.setattr(model_setup, "loaded_transformer", load)
    monkeypatch.setattr(
        evaluator, "score", lambda parts, *rest, **options: [len(part) for part in parts]
    )
    monkeypatch.setattr(GRPOPipeline, "decode", lambda self, latents, **options: [None])
    evaluator.policy(Source(), LatentStore(tmp_path / "latents", ""))
    assert seen == [{}, {}], "of both experts"
    assert encoder._loaded == {}, "nothing was encoded again"
