"""What a run saves and its programs read are the weights that the documentation names: the EMA where
there is one, the policy beside it.
"""

import pytest
import torch

from hyvideo.checkpoints import format
from hyvideo.loading import saved_policy
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import pairs_of
from hyvideo.models.lora_files import read_lora
from hyvideo.trainer import Trainer
from scripts import export
from tests.distributed.launch import launch
from tests.shallow import write_trained
from tests.test_trainer import Redness

CPU = torch.device("cpu")
LORA = {"lora_rank": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("shallow") / "ckpts")


@pytest.fixture
def train(tiny_config, mesh, root):
    """A function that trains one iteration and returns the trainer and its checkpoint."""

    def with_settings(**settings):
        config = tiny_config.with_settings(
            pretrained_model_root=root,
            random_weights=False,
            learning_rate=1e-2,
            max_steps=1,
            save_asynchronously=False,
            **settings,
        )
        trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
        trainer.train()
        return trainer, trainer.output_dir / "checkpoints" / "000001"

    return with_settings


def weights(transformer):
    return {name: tensor.detach().clone() for name, tensor in transformer.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def lora_weights(lora):
    pairs = pairs_of(lora).items()
    return {f"{name}.{part}": getattr(pair, part).clone() for name, pair in pairs for part in "ab"}


DECAYS = pytest.mark.parametrize(
    "decay", [0.5, pytest.param(0.0, marks=pytest.mark.system)], ids=["ema", "no ema"]
)


@DECAYS
def test_the_lora_of_a_checkpoint_is_the_ema_and_its_tensors_are_those_of_the_policy(train, decay):
    trainer, checkpoint = train(ema_decay=decay, **LORA)
    policy = trainer.run.policy
    current = lora_weights(policy.lora())
    with policy.with_ema_weights():
        expected = lora_weights(policy.lora())
    assert same(current, expected) == (decay == 0)
    saved = lora_weights(read_lora(checkpoint / format.LORA))
    assert same(saved, expected)
    names = saved_policy.stored_names(policy.trained, checkpoint)
    assert {name.partition(".")[0] for name in names.values()} == {"average" if decay else "policy"}
    loaded = load_transformer(trainer.config.model.pretrained_model_root, "miniature")
    saved_policy.load_into(loaded, checkpoint)
    found = {
        name: parameter.detach()
        for name, parameter in loaded.named_parameters()
        if ".lora_" in name
    }
    with policy.with_ema_weights():
        assert same(found, {name: p.detach().clone() for name, p in policy.trained.items()})


@DECAYS
def test_a_checkpoint_of_all_weights_is_sampled_and_exported_as_its_ema(
    train, decay, tmp_path, exit_code
):
    trainer, checkpoint = train(ema_decay=decay)
    policy = trainer.run.policy
    with policy.with_ema_weights():
        expected = weights(policy.transformer)
    assert same(weights(policy.transformer), expected) == (decay == 0)
    assert same(weights(saved_policy.load(checkpoint, torch.float32)), expected)
    into = load_transformer(trainer.config.model.pretrained_model_root, "miniature")
    saved_policy.load_into(into, checkpoint)
    assert same(weights(into), expected)
    code = exit_code(
        export.main,
        "--checkpoint_path",
        checkpoint,
        "--output_dir",
        tmp_path / "out",
        "--dtype",
        "fp32",
    )
    assert code == 0
    into = load_transformer(trainer.config.model.pretrained_model_root, "miniature")
    saved_policy.load_into(into, tmp_path / "out")
    assert same(weights(into), expected)


@pytest.mark.parametrize(
    "settings, dtypes",
    [
        ({}, (torch.float32, torch.float32)),
        ({"dtype": "bf16"}, (torch.float32, torch.float32)),
        ({"dtype": "bf16", **LORA}, (torch.float32, torch.bfloat16)),
    ],
    ids=["fp32", "bf16", "lora"],
)
def test_trained_frozen_and_averaged_weights_have_their_dtypes(
    tiny_config, mesh, root, settings, dtypes
):
    config = tiny_config.with_settings(
        pretrained_model_root=root, random_weights=False, ema_decay=0.5, **settings
    )
    policy = Trainer(config, mesh, CPU, scorers={"test": Redness()}).run.policy
    of_policy, of_others = dtypes
    trained = {id(parameter) for parameter in policy.parameters}
    others = [each for each in policy.transformer.parameters() if id(each) not in trained]
    assert {parameter.dtype for parameter in policy.parameters} == {of_policy}
    assert {parameter.dtype for parameter in others} == {of_others}
    assert {tensor.dtype for tensor in policy.ema.tensors().values()} == {of_policy}


def sampled_with(folder, reshard_after_forward):
    """Return the adapter and the latents of policy and anchor after an iteration on each rank,
    while a forward pass may have left weights gathered.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.settings.command_line import load_config
    from tests.distributed.test_same_run import SETTINGS, ThresholdScorer

    changes = {"batch_size": 4, "enable_fsdp": True, "dtype": "bf16", "ema_decay": 0.0, **LORA}
    changes |= {"learning_rate": 0.1, "reshard_after_forward": reshard_after_forward}
    config = load_config("configs/smoke.yaml", output_dir=folder, **SETTINGS | changes)
    mesh = ranks.start(1, CPU, timeout=60)
    run = Trainer(config, mesh, CPU, scorers={"test": ThresholdScorer(-9.0)})
    run.iteration = 1
    run.run_iteration()
    collector, policy = run.run.source, run.run.policy
    indices = collector.choose(1).indices
    conditions = collector.encoder(collector.choose(1).requests[: len(indices)])

    def latents():
        final = collector.sample(1, collector.schedule, indices, conditions).final
        return final.flatten().tolist()

    of_policy = latents()
    adapter = lora_weights(policy.lora())
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    with policy.anchor.swapped_in():
        of_anchor = latents()
    assert of_anchor != of_policy == latents()
    return of_policy, of_anchor, {name: each.tolist() for name, each in adapter.items()}


@pytest.mark.system
def test_gathered_weights_are_never_used_or_saved_in_place_of_the_anchor_or_the_adapter(tmp_path):
    """With and without ``reshard_after_forward``, which may not change anything but memory."""
    target = "tests.wiring.test_saved_weights:sampled_with"
    one, other = (
        launch(target, 2, str(tmp_path / str(reshard)), reshard) for reshard in (True, False)
    )
    assert one == other
