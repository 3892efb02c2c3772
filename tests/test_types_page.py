"""docs/types.md is generated from the docstrings of the types of an iteration and the comments
beside their fields.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys

import pytest

from hyvideo.data.prompts import Request
from hyvideo.grpo.loss import LossInputs, LossTerms
from hyvideo.grpo.metrics import UpdateResult
from hyvideo.grpo.nft import NFTInputs, NFTTerms
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.rewards.rewards import Reward
from hyvideo.schedulers.schedule import Schedule, Step
from hyvideo.training.objective import Terms
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex
from hyvideo.training.run_state import SavedState
from tests.forked import ROOT

HEAD = """# Types

The values that flow through an iteration, in the order of [architecture.md](architecture.md): each type, where it is
made and read, and its fields. This page is generated from the docstrings of the types and the comments beside their
fields by `python -m pytest tests/test_types_page.py --regenerate`. [glossary.md](glossary.md) defines the terms.

| type, field | file, type and shape | meaning |
|---|---|---|
"""
COLLECTOR, UPDATE = (
    "training.rollouts:Rollouts",
    "training.policy_update:PolicyUpdate",
)
GRPO, NFT = "training.objectives.grpo:GRPO", "training.objectives.nft:NFT"
PIPELINE, ENCODER = (
    "pipelines.grpo_pipeline:GRPOPipeline",
    "pipelines.condition_encoder:ConditionEncoder",
)
FLOW = {  # type -> where it is made, and where it is read
    Request: (
        ["data.prompts:read_requests"],
        ["models.hunyuan_video15.family", f"{COLLECTOR}.collect"],
    ),
    Condition: ([f"{ENCODER}.__call__"], ["models.hunyuan_video15.transformer"]),
    Conditions: ([f"{ENCODER}.__call__"], [PIPELINE]),
    Trajectories: (
        [f"{PIPELINE}.sample"],
        ["training.rollout_batch:RolloutBatch.replay", f"{GRPO}.terms"],
    ),
    RolloutIndex: (
        ["training.rollout_batch:indices_of_replica"],
        ["training.rollout_batch:RolloutNoise.initial"],
    ),
    RolloutBatch: (
        [f"{COLLECTOR}.collect"],
        [f"{GRPO}.terms", f"{NFT}.terms", "training.rollout_records:RolloutRecorder.record"],
    ),
    Reward: (["rewards.scoring:AsyncScorer.collect"], ["training.rewards:merge_rewards"]),
    Schedule: (
        ["settings.sampling:Sampling.schedule"],
        [f"{COLLECTOR}.schedule_of", f"{GRPO}.terms"],
    ),
    Step: (
        ["schedulers.schedule:Schedule.draw", "schedulers.schedule:Schedule.score"],
        [f"{PIPELINE}.sample", f"{GRPO}.terms"],
    ),
    LossInputs: ([f"{GRPO}.terms"], ["grpo.loss:grpo_terms"]),
    NFTInputs: ([f"{NFT}.terms"], ["grpo.nft:nft_terms"]),
    LossTerms: (["grpo.loss:grpo_terms"], [f"{GRPO}.terms"]),
    NFTTerms: (["grpo.nft:nft_terms"], [f"{NFT}.terms"]),
    Terms: ([f"{GRPO}.terms", f"{NFT}.terms"], [UPDATE]),
    UpdateResult: ([UPDATE], ["grpo.metrics:average"]),
}
OTHERS = {  # types of the same modules that are not on the page
    "PendingRewards", "Pass", "UpdateWork", "Accumulated", "RolloutNoise", "PromptOrder", "ImageCondition",
    "SamplerSettings", "KLWeights", "KLScheduleSettings", "Entry", "SetMeasure", "ScoreResult", "Transitions",
}  # fmt: skip
SHAPE = re.compile(r"\(([^()]|\([^()]*\))*\)")


def comments_of(lines: list[str], nodes: list[ast.AST]) -> list[str]:
    """Return the comment beside each node, or above it."""
    found = []
    for node in nodes:
        beside = lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2]
        above = node.lineno - 2
        while lines[above].strip().startswith("# "):
            above -= 1
        before = [line.strip().removeprefix("# ") for line in lines[above + 1 : node.lineno - 1]]
        found.append(beside or " ".join(before))
    return found


def fields_of(cls: type) -> list[tuple[str, str, str]]:
    """Return name, annotation and comment of each field of a class."""
    source = inspect.getsource(cls)
    body = ast.parse(source).body[0].body
    nodes = {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}
    assert [*nodes] == [*inspect.get_annotations(cls)]
    comments = comments_of(source.splitlines(), [*nodes.values()])
    return [
        (name, ast.unparse(node.annotation), text)
        for (name, node), text in zip(nodes.items(), comments)
    ]


def row(name: str, annotation: str, comment: str) -> str:
    shape = SHAPE.match(comment) if "Tensor" in annotation else None
    meaning = comment[shape.end() :].lstrip(", ") if shape else comment
    kind = f"`{annotation.replace(' | ', ' or ')}`" if annotation else ""
    cells = [f"`{name}`", f"{kind} {shape[0] if shape else ''}".strip(), meaning.replace("``", "`")]
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |\n"


def shown(place: str) -> str:
    """Return ``Class.method``, ``module.function``, or a file for a module."""
    module, _, name = place.partition(":")
    if not name:
        return f"{module.replace('.', '/')}.py"
    return name if name[0].isupper() else f"{module.rpartition('.')[2]}.{name}"


def title(name: str, file: str, text: str, made: list[str], read: list[str]) -> str:
    made, read = (" and ".join(f"`{shown(place)}`" for place in places) for places in (made, read))
    link = f"[{file}](../hyvideo/{file})"
    return f"| **{name}** | {link} | {text.replace('``', '`')} Made in {made}, read in {read}. |\n"


def page() -> str:
    parts = [HEAD]
    for cls, places in FLOW.items():
        text = " ".join(inspect.getdoc(cls).partition("\n\n")[0].split())
        parts.append(
            title(cls.__name__, cls.__module__.replace(".", "/")[8:] + ".py", text, *places)
        )
        parts += [row(*field) for field in fields_of(cls)]
    places = ["training.run_state:RunState.save"], ["training.run_state:RunState.resume"]
    text = "What a run needs to resume bit for bit: `tensors` in shards, the rest in `state.json`."
    parts.append(title("checkpoint", "training/run_state.py", text, *places))
    text = "weights, optimizer state, and the copies of a moving anchor and the EMA, by name"
    parts += [
        row("tensors", "dict[str, Tensor]", text),
        *(row(*field) for field in fields_of(SavedState)),
    ]
    return "".join(parts)


def test_the_types_page_is_up_to_date(check_generated):
    check_generated(ROOT / "docs/types.md", page())


@pytest.mark.parametrize("cls", FLOW, ids=lambda cls: cls.__name__)
def test_a_type_is_documented_made_and_read_where_the_page_says(cls):
    undocumented = [name for name, _, comment in fields_of(cls) if not comment]
    assert not undocumented, f"write a comment beside each field of {cls.__name__}"
    made, read = (
        [pkgutil.resolve_name(f"hyvideo.{place}") for place in places] for places in FLOW[cls]
    )
    members = {name for name, *_ in fields_of(cls)} | {
        name for name in vars(cls) if not name.startswith("_")
    }
    for place in made:
        module = inspect.getsource(sys.modules[place.__module__])
        assert re.search(rf"\b{cls.__name__}[(.]", module), f"{place} does not make {cls.__name__}"
    for place in read:
        assert members & {*re.findall(r"\.(\w+)", inspect.getsource(place))}, (
            f"{place} does not read {cls.__name__}"
        )


def test_every_type_of_an_iteration_is_on_the_page():
    training = ("policy_update", "rollout_collector", "rewards")
    modules = {sys.modules[cls.__module__] for cls in FLOW}
    modules |= {importlib.import_module(f"hyvideo.training.{name}") for name in training}
    defined = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
        if dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    }
    assert defined == {cls.__name__ for cls in FLOW} | OTHERS & defined


def test_every_saved_entry_is_documented():
    assert all(comment for _, _, comment in fields_of(SavedState))
