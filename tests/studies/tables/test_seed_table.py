"""Tables recomputed from results of seeds."""

import numpy as np
import pytest
from scipy import stats

from scripts import seed_tables
from studies.tables.seed_table import as_markdown, read_seed_table
from tests.forked import ROOT

DATA = ROOT / "docs/data"


@pytest.fixture
def csv_of(tmp_path):
    """Writes the text of a CSV file and returns its path."""

    def write(text):
        path = tmp_path / "table.csv"
        path.write_text(text)
        return path

    return write


def test_means_and_intervals_are_over_seeds(csv_of):
    table = read_seed_table(
        csv_of(
            "method,size,seed,reward,true\nours,1,0,1,5\nours,1,1,2,\nours,1,2,6,7\nbase,1,,4,8\n"
        )
    )
    found = table.intervals(("ours", "1"))
    low, high = stats.t.interval(0.95, 2, loc=3, scale=stats.sem([1, 2, 6]))
    assert (found["reward"].mean, found["true"].mean) == (3, 6)
    assert (found["reward"].low, found["reward"].high) == pytest.approx((low, high))
    assert table.num_seeds(("ours", "1")) == 3
    assert np.isnan(table.intervals(("base", "1"))["reward"].low)  # of one value
    assert "| base | 1 | 1 | 4.000 | 8.000 |" in as_markdown(table)


def test_differences_are_paired_by_seed(csv_of):
    text = "method,seed,reward\na,0,1.0\na,1,5.0\na,2,9.0\nb,2,8.5\nb,1,4.7\nb,3,0\n"
    table = read_seed_table(csv_of(text))
    difference = table.differences(("a",), ("b",))["reward"]
    low, high = stats.t.interval(0.95, 1, loc=0.4, scale=stats.sem([0.3, 0.5]))
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.4, low, high))
    lines = as_markdown(table, ("b",)).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| a | 3 | +0.400 [")


def test_the_command_prints_tables_and_names_a_label_that_is_missing(exit_code, capsys):
    assert exit_code(seed_tables.main) == 0  # without names, all files
    printed = capsys.readouterr().out
    assert all(path.name in printed for path in DATA.glob("*.csv"))
    assert exit_code(seed_tables.main, DATA / "improve.csv", "--against", "nothing") == 2
    assert "--against" in capsys.readouterr().err
