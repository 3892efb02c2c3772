"""The verification levels in docs/recipes.md hold, and every config has one."""

import re

from tests.standards.test_standards import NUM_ITERATIONS, RECIPES, TOLERANCE
from tests.test_docs import ROOT, TEXTS

PAGE = TEXTS["docs/recipes.md"]
ROWS = dict(re.findall(r"^\| \*(\w+)\* \| .* \| (.*) \|$", PAGE, re.MULTILINE))
CONFIGS = ROOT / "configs"


def configs_of(level):
    """Return the names of the configs of a level."""
    patterns = re.findall(r"`([^`]+)`", ROWS[level])
    return {
        str(path.relative_to(CONFIGS).with_suffix(""))
        for p in patterns
        for path in CONFIGS.glob(f"{p}.yaml")
    }


def test_every_config_has_one_level():
    configs = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("paper/*.yaml")]
    levels = [
        name
        for level in ("measured", "reproduced", "tried", "checked", "predicted")
        for name in configs_of(level)
    ]
    assert sorted(levels) == sorted(
        str(path.relative_to(CONFIGS).with_suffix("")) for path in configs
    )
    assert len(ROWS) == 5


def test_measured_and_reproduced_recipes_have_a_standard():
    assert configs_of("measured") | configs_of("reproduced") == set(RECIPES)
    words = f"within {100 * TOLERANCE['first iteration']:g} %, later iterations within"
    assert f"{words} {100 * TOLERANCE['later iterations']:g} %" in PAGE and NUM_ITERATIONS == 5
