"""The first iterations of the miniature's recipes have the metrics that are committed in this
folder.

A file has the metrics of five iterations of the config with its name, on one thread, except times
and memory. To update those that have moved by more than the tolerance:

    python -m pytest tests/standards --slow --regenerate

The commit message must then say why they moved. With the same torch, CPU instructions and one
thread, the metrics are equal to the last bit. `tolerance.json` has the tolerance for other CPUs and
the deviations from which it was derived.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from tests.forked import ROOT

FOLDER = Path(__file__).parent
RECIPES = (
    "miniature",
    "miniature_guidance",
    "miniature_i2v",
    "miniature_nft",
    "miniature_paper",
    "miniature_wan",
)
QUICK = {"miniature_guidance": 2, "miniature": 1}  # iterations without --slow
NUM_ITERATIONS = 5
NOT_COMPARED = ("time/", "memory/", "perf/", "quantiles/")
OUTPUT = {
    "valid_video_csv": "",
    "log_video_interval": 0,
    "report": False,
    "report_to": ["none"],
    "num_threads": 1,
}
TOLERANCE = json.loads((FOLDER / "tolerance.json").read_text())


def first_metrics(recipe, num_iterations, folder):
    """Return the metrics of a recipe's first iterations, without validations, as lists by name."""
    config = load_config(f"configs/{recipe}.yaml", output_dir=str(folder), **OUTPUT)
    trainer, found = Trainer(config, Mesh.single(), torch.device("cpu")), {}
    for iteration in range(num_iterations):
        trainer.iteration += 1
        for name, value in trainer.run_iteration().items():
            if not name.startswith(NOT_COMPARED):
                found.setdefault(name, [None] * num_iterations)[iteration] = value
    return json.loads(json.dumps(found))


def numbers(value):
    """Return a metric's values as a list; metrics by step have several, some of them None."""
    return [
        math.nan if number is None else number
        for number in (value if isinstance(value, list) else [value])
    ]


def deviation(expected, found, scale):
    """Return the largest deviation of a metric relative to ``scale``, infinite if a value appears
    or disappears.
    """
    old, new = numbers(expected), numbers(found)
    if [*map(math.isnan, old)] != [*map(math.isnan, new)]:
        return math.inf
    largest = max(
        (abs(x - y) for x, y in zip(old, new) if x != y and not math.isnan(x)), default=0.0
    )
    return max(0.0, largest - TOLERANCE["absolute"]) / max(scale, TOLERANCE["absolute"])


def deviations(standard, found):
    """Yield name, iteration and deviation of each metric, relative to the largest value in the
    standard.
    """
    num_iterations = len(found["iteration"])
    for name in sorted(standard.keys() | found.keys()):
        expected = standard.get(name, [None] * NUM_ITERATIONS)
        scale = max(
            (abs(x) for value in expected for x in numbers(value) if not math.isnan(x)), default=0.0
        )
        values = found.get(name, [None] * num_iterations)
        for iteration, (before, after) in enumerate(zip(expected, values), start=1):
            yield name, iteration, deviation(before, after, scale)


def moved(standard, found):
    """Return a line for each metric that has moved by more than the tolerance."""
    lines = []
    for name, iteration, by in deviations(standard, found):
        tolerance = TOLERANCE["first iteration" if iteration == 1 else "later iterations"]
        if not by <= tolerance:
            before, after = (
                metrics.get(name, [None] * NUM_ITERATIONS)[iteration - 1]
                for metrics in (standard, found)
            )
            words = (
                f"moved by {100 * by:.3g} %, tolerance {100 * tolerance:g} %: {before} -> {after}"
            )
            lines.append(f"{name} of iteration {iteration} {words}")
    return lines


def standard_of(recipe):
    path = FOLDER / f"{recipe}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(recipe, metrics):
    """Write a standard with one line per metric."""
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(metrics.items())
    )
    (FOLDER / f"{recipe}.json").write_text(f"{{\n{lines}\n}}\n")


SLOW = [pytest.param(recipe, NUM_ITERATIONS, marks=pytest.mark.slow) for recipe in RECIPES]


@pytest.mark.system
@pytest.mark.parametrize("recipe, num_iterations", [*QUICK.items(), *SLOW])
def test_the_first_iterations_of_a_recipe_have_the_metrics_of_its_standard(
    recipe, num_iterations, tmp_path, monkeypatch, request
):
    monkeypatch.chdir(ROOT)
    found = first_metrics(recipe, num_iterations, tmp_path / "run")
    lines = moved(standard_of(recipe), found)
    if request.config.getoption("--regenerate"):
        if lines and num_iterations == NUM_ITERATIONS:
            write(recipe, found)
        return
    command = "python -m pytest tests/standards --slow --regenerate"
    assert not lines, "\n".join(
        [*lines, f"If this is intended: {command}; the commit message must say why."]
    )
