import math

import pytest

from hyvideo.validation.scores_file import Evaluation
from studies.recipes.runs import RecipeRun
from studies.tables.cells import Cell
from studies.tables.table2 import table_of

SAGE = [RecipeRun(Cell("A", "sage_grpo", "dual_moving", True), seed) for seed in (0, 1)]
FLOW = [RecipeRun(Cell("A", "flow_grpo", "none", False), seed) for seed in (0, 1)]


def evaluation(scores, *, frechet=None, **more):
    """Return an evaluation with one video of each prompt and VQ = MQ = TA = score."""
    entries = [
        {"group": group, "VQ": s, "MQ": s, "TA": s, "Overall": None if s is None else 3 * s, **more}
        for group, s in enumerate(scores)
    ]
    return Evaluation(entries, {} if frechet is None else {"frechet_distance": frechet})


@pytest.fixture
def table():
    truth = {"true/VQ": 1.0, "true/MQ": 1.0, "true/TA": 2.0}
    found = {
        SAGE[0]: evaluation([0.8, 0.6], frechet=0.1, **truth),
        SAGE[1]: evaluation([0.6, None], frechet=0.3, **truth),
        FLOW[0]: evaluation([0.3, 0.3], frechet=0.1),
    }
    return table_of(evaluation([-0.1, -0.2], frechet=0.05), SAGE + FLOW, found)


def test_means_are_over_prompts_with_a_score_in_every_seed(table):
    base, sage, flow = (row.values for row in table.rows)
    assert sage["A: VQ"].mean == pytest.approx(0.7)
    assert sage["A: Overall"].mean == pytest.approx(2.1)
    assert sage["A: True reward"].mean == 4  # averaged weights
    assert flow["A: VQ"].low == flow["A: VQ"].high == pytest.approx(0.3)
    assert base["A: VQ"].mean == pytest.approx(-0.15)


def test_a_set_metric_has_an_interval_over_seeds_and_none_for_one_seed(table):
    """For two numbers the half width is half their distance times 12.706, relative to the mean."""
    frechet = table.rows[1].values["A: Frechet distance"]
    spread = math.exp(1.2706 / 0.2)
    assert (frechet.low, frechet.mean, frechet.high) == pytest.approx(
        (0.2 / spread, 0.2, 0.2 * spread), rel=1e-3
    )
    assert math.isnan(table.rows[2].values["A: Frechet distance"].low)


def test_the_best_trained_row_has_the_lowest_frechet_distance(table):
    assert table.best("A: VQ") is table.rows[1]
    assert table.best("A: Frechet distance") is table.rows[2]
