"""Settings are not lost on their way to the code that they are for.

Whether each value has its effect is tested beside that code, and in training/test_run_setup.py.
"""

import ast
from dataclasses import fields, replace

import pytest
import torch

from hyvideo.pipelines.grpo_pipeline import SamplerSettings
from hyvideo.settings.config import LEAVES
from hyvideo.trainer import Trainer
from tests.forked import ROOT
from tests.test_trainer import Redness

CPU = torch.device("cpu")
ONLY_CHECK_OR_DESCRIBE = {"rules", "machine_rules", "without_effect", "plan_text", "version_notes"}


def test_every_setting_is_read_by_the_code_that_it_is_for():
    """By its name; what checks or describes settings does not count."""
    paths = [*(ROOT / "hyvideo").rglob("*.py"), *ROOT.glob("*.py")]
    read = set()
    for path in paths:
        if path.parent.name == "settings" and path.stem in ONLY_CHECK_OR_DESCRIBE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(node.slice.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                read |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    unread = LEAVES.keys() - read
    assert not unread


@pytest.fixture
def trainer(distinct, mesh):
    config = distinct.with_settings(batched_forward=False)
    return Trainer(config, mesh, CPU, scorers={"test": Redness()})


def test_pipelines_with_another_guidance_keep_all_other_settings(trainer):
    pipeline = trainer.run.pipeline
    defaults = SamplerSettings()
    assert all(
        getattr(pipeline.sampling, each.name) != getattr(defaults, each.name)
        for each in fields(SamplerSettings)
    )
    guidance = trainer.config.validation_sampling.guidance
    assert guidance != pipeline.sampling.guidance
    other = pipeline.with_guidance(guidance)
    assert other.sampling == replace(pipeline.sampling, guidance=guidance)
    attributes, others = vars(pipeline) | {"sampling": None}, vars(other) | {"sampling": None}
    assert attributes.keys() == others.keys()
    assert all(others[name] is value for name, value in attributes.items())
    assert trainer.validation.pipeline.sampling == other.sampling


def test_each_pipeline_of_a_run_has_the_levels_and_guidance_of_its_purpose(trainer):
    config = trainer.config
    for pipeline, schedule, sampling in (
        (trainer.run.pipeline, trainer.run.source.schedule, config.sampling),
        (trainer.validation.pipeline, trainer.validation.schedule, config.validation_sampling),
    ):
        assert schedule == sampling.schedule()
        assert pipeline.sampling.guidance.scale == sampling.guidance_scale
    assert config.sampling.schedule() != config.validation_sampling.schedule()
