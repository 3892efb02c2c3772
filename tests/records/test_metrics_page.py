"""docs/metrics.md lists exactly the metrics that a run can write."""

import ast
import re

import torch

from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.validation.reward_hacking.held_out_metrics import (
    ScorerMetrics,
    measure_videos,
    summarise_videos,
)
from hyvideo.validation.reward_hacking.rule import SET_MEASURES
from hyvideo.validation.scores_file import split_reward, summarise_rewards
from tests.forked import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
DOCUMENTED = [name for cell in CELLS for name in re.findall(r"`([^`]+)`", cell)]
NAME = re.compile(r"[a-z_]+/(?:[\w/]|<\w+>)+(?<!/)")
# Strings that look like names of metrics: paths, tags of videos, inputs and a key of the
# rendezvous.
NO_METRICS = {
    "agreement",
    "assets",
    "configs",
    "docs",
    "outputs",
    "reward_model",
    "rollout",
    "text_encoder",
    "vision_encoder",
}


def undocumented(names, open_names=("VQ", "MQ", "TA", "seen")):
    """Return the names without a row; those of scorers and stages have one such as
    ``reward/<dimension>``.
    """
    rows = {re.sub(r"<\w+>", "<>", row) for row in DOCUMENTED}
    parts = rf"\b({'|'.join(open_names)})$|(?<=^perf/tflops/)\w+$|(?<=^perf/mfu/)\w+$|<\w+>"
    return sorted(name for name in names if re.sub(parts, "<>", name) not in rows)


def written_in_code():
    """Yield names in the code that computes metrics; formatted parts are ``<name>``, timed stages
    ``time/<stage>``.
    """
    sources = [
        ROOT / "hyvideo" / name
        for name in ("trainer.py", "validation/validation.py", "miniature/reward.py")
    ]
    folders = ("grpo", "training", "training/objectives", "records")
    sources += [path for folder in folders for path in (ROOT / "hyvideo" / folder).glob("*.py")]
    for node in (
        node
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    ):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            name = "".join(
                part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values
            )
            yield f"validation/{name}" if name.startswith("true/") else name
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "timed":
            yield f"time/{node.args[0].value}"


def validation_metrics(mesh):
    scorer = MiniatureScorer(ROOT / "assets/miniature")
    rewards = {k: Reward(1.0, {"VQ": 1.0, "MQ": 1.0, "TA": 1.0, "seen": 1.0}) for k in (0, 1)}
    videos = {k: torch.zeros(5, 3, 32, 32, dtype=torch.uint8) for k in (0, 1)}
    of_scorers = ScorerMetrics(AsyncScorer({"test": scorer}, {"VQ": 1.0}), mesh)
    of_scorers.add(videos, ["a red circle moves up"] * 2)
    measured = measure_videos(videos, rewards, {"VQ": 1.0})
    measures, _ = summarise_videos(measured, of_scorers.of_videos(), [0, 0], mesh)
    of_rewards = summarise_rewards([*rewards.values()])[0] | split_reward(
        [*rewards.values()], [True, False]
    )
    return {f"validation/{name}" for name in (*measures, *of_rewards, *SET_MEASURES)}


def test_the_page_lists_exactly_the_metrics_of_a_run(mesh):
    found = {
        name
        for name in written_in_code()
        if NAME.fullmatch(name) and name.split("/")[0] not in NO_METRICS
    }
    found -= {"time/<name>", "by_step/<name>"}  # stages and steps are listed by name
    found -= {"time/save", "time/validation"}  # after the metrics are complete
    found |= {"by_step/ratio_mean", "by_step/ratio_max_deviation"}
    found |= {
        "iteration",
        "update",
        "lr",
        "time/iteration",
        "validation/hacking",
        *validation_metrics(mesh),
    }
    assert {"reward/<name>", "policy/ratio_mean", "time/anchor", "validation/true/<name>"} <= found
    assert not undocumented(found)
    exact = {name for name in DOCUMENTED if "<" not in name}
    assert not exact - found and len(DOCUMENTED) == len({*DOCUMENTED})
