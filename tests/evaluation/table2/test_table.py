import csv

import pytest

from hyvideo.evaluation.scores_file import Evaluation
from hyvideo.evaluation.table2.runs import TableRun
from hyvideo.evaluation.table2.table import RowKey, make_table
from hyvideo.evaluation.table2.table_files import as_latex, as_markdown, write_table

SAGE = [TableRun("A", "sage_grpo", "dual_moving", True, seed) for seed in (0, 1)]
FLOW = [TableRun("A", "flow_grpo", "none", False, seed) for seed in (0, 1)]


def evaluation(scores, *, frechet=None, **more):
    """One video of each prompt; VQ = MQ = TA = the score."""
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
    return make_table(evaluation([-0.1, -0.2], frechet=0.05), SAGE + FLOW, found)


def test_means_are_over_all_videos_that_have_a_score(table):
    sage, flow = RowKey.of(SAGE[0]), RowKey.of(FLOW[0])
    assert table.values[sage, "A", "VQ"].mean == pytest.approx(2 / 3)
    assert table.values[sage, "A", "Overall"].mean == pytest.approx(2)
    assert table.values[sage, "A", "True reward"].mean == 4  # averaged weights
    assert table.values[flow, "A", "VQ"].low == table.values[flow, "A", "VQ"].high == pytest.approx(0.3)
    assert table.values[RowKey(None), "A", "VQ"].mean == pytest.approx(-0.15)


def test_a_measure_of_the_set_has_the_range_of_its_seeds(table):
    frechet = table.values[RowKey.of(SAGE[0]), "A", "Frechet distance"]
    assert (frechet.low, frechet.mean, frechet.high) == pytest.approx((0.1, 0.2, 0.3))


def test_the_best_trained_row_is_found_and_lower_frechet_is_better(table):
    by_name = {column.name: column for column in table.columns}
    assert table.best("A", by_name["VQ"]) == RowKey.of(SAGE[0])
    assert table.best("A", by_name["Frechet distance"]) == RowKey.of(FLOW[0])


def test_columns_that_nothing_measures_are_left_out_and_gaps_are_dashes(table):
    assert "CLIPScore" not in [column.name for column in table.columns]
    heads, _, base, *rows = as_markdown(table).splitlines()
    assert heads.startswith("| Method | KL | Equalizer | A: Overall | A: VQ")
    assert base.startswith("| Base model |  |  | -0.450 [-0.600, -0.300] |")
    assert rows[0].startswith("| SAGE-GRPO | dual moving | yes | **2.000** [")
    assert rows[1].split(" | ")[7] == "-"  # no true reward was measured


def test_cells_without_a_run_are_named(table):
    assert "not in the means: A-flow_grpo-none-noeq-seed1" in as_markdown(table)


@pytest.mark.parametrize(
    "num_seeds, said, unsaid",
    [(1, "over prompts alone", "narrow"), (3, "too narrow", "alone"), (5, "5 train", "narrow")],
)
def test_intervals_of_few_seeds_are_said_to_be_too_narrow(num_seeds, said, unsaid):
    cells = [TableRun("A", "cps", "none", True, seed) for seed in range(num_seeds)]
    text = as_markdown(make_table(evaluation([0.0]), cells, {cell: evaluation([0.1, 0.2]) for cell in cells}))
    assert said in text and unsaid not in text


def test_the_equalizer_is_a_column_only_where_it_differs():
    table = make_table(evaluation([0.0]), SAGE, {})
    assert "Equalizer" not in as_markdown(table)


def test_latex_has_as_many_cells_in_a_row_as_columns(table):
    text = as_latex(table)
    columns = 3 + len(table.columns)
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert all(line.count("&") == columns - 1 for line in rows) and len(rows) == 4
    assert r"\textbf{2.000}" in text and "$-$0.450" in text


def test_the_files_hold_the_table(table, tmp_path):
    write_table(table, tmp_path)
    rows = list(csv.DictReader((tmp_path / "table2.csv").open()))
    assert [row["Method"] for row in rows] == ["Base model", "SAGE-GRPO", "FlowGRPO"]
    assert float(rows[1]["A VQ"]) == pytest.approx(2 / 3, abs=1e-5)
    assert rows[1]["A seeds"] == "2" and rows[2]["A True reward low"] == ""
