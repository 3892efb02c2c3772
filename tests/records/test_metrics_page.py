"""docs/metrics.md has every name that a run can write, and no other."""

import ast
import re

import torch

from hyvideo.evaluation.reward_hacking.held_out_metrics import measure_all
from hyvideo.evaluation.reward_hacking.rule import SET_MEASURES
from hyvideo.evaluation.scores_file import summarise_rewards
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward
from tests.forked import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
NAME = re.compile(r"[a-z_]+/(?:[\w/]|<\w+>)+")
# What is written like the name of a metric: first parts of paths, tags of videos, and a key of the rendezvous.
NO_METRICS = {"agreement", "assets", "configs", "docs", "outputs", "rollout", "text_encoder", "vision_encoder"}


def undocumented(names, open_names=("VQ", "MQ", "TA", "seen")):
    """Names that have no row; what a scorer is free to name has one such as ``reward/<dimension>``."""
    rows = {re.sub(r"<\w+>", "<>", row) for row in DOCUMENTED}
    return sorted(name for name in names if re.sub(rf"\b({'|'.join(open_names)})$|<\w+>", "<>", name) not in rows)


def written_in_code():
    """Names in the code that makes metrics; a formatted part is ``<name>``, and a timed stage ``time/<stage>``."""
    sources = [ROOT / "hyvideo" / name for name in ("trainer.py", "evaluation/validation.py", "miniature/reward.py")]
    sources += [p for folder in ("grpo", "training", "records") for p in (ROOT / "hyvideo" / folder).glob("*.py")]
    for node in (node for source in sources for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            name = "".join(part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values)
            yield f"validation/{name}" if name.startswith("true/") else name
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "timer":
            yield f"time/{node.args[0].value}"


def of_a_validation(mesh):
    scorer = MiniatureScorer(ROOT / "assets/miniature")
    rewards = {k: Reward(1.0, {"VQ": 1.0, "MQ": 1.0, "TA": 1.0, "seen": 1.0}) for k in (0, 1)}
    videos = {k: torch.zeros(5, 3, 32, 32, dtype=torch.uint8) for k in (0, 1)}
    prompts, asynchronous = ["a red circle moves up"] * 2, AsyncScorer({"test": scorer}, {"VQ": 1.0})
    measures, _ = measure_all(videos, rewards, prompts, [0, 0], asynchronous, mesh)
    return {f"validation/{name}" for name in (*measures, *summarise_rewards([*rewards.values()])[0], *SET_MEASURES)}


def test_the_page_has_every_metric_and_nothing_that_no_run_writes(mesh):
    found = {name for name in written_in_code() if NAME.fullmatch(name) and name.split("/")[0] not in NO_METRICS}
    found -= {"kl/total", "time/<name>"}  # taken out before it is written; every stage is there by its name
    found |= {"iteration", "update", "lr", "validation/hacking", *of_a_validation(mesh)}
    assert {"reward/<name>", "policy/ratio_mean", "time/anchor", "validation/true/<name>"} <= found
    assert not undocumented(found)
    exact = {name for name in DOCUMENTED if "<" not in name}
    assert not exact - found and len(DOCUMENTED) == len({*DOCUMENTED})
