"""The page of many runs in a browser: table, groups of seeds, sweeps, different rewards, and the
controls of plots.
"""

import pytest

from hyvideo.report.page import write_report
from tests.report.recorded_runs import record_run

MANY = (
    "(plot) => plot.data.filter((trace) => trace.hoverinfo !== 'skip').map((trace) => trace.name)"
)


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A page of three seeds, a run with another reward, and a sweep of two recipes with two seeds
    each.
    """
    folder = tmp_path_factory.mktemp("many")
    runs = [
        record_run(folder / f"base-seed{seed}", seed=seed, gains=(0.1 * seed, 0.3))
        for seed in range(3)
    ]
    runs.append(record_run(folder / "averaged", reward_weights="averaged", gains=(0.9,)))
    for eta in (0.3, 0.5):
        for seed in range(2):
            place = folder / "sweep" / "cells" / f"eta{10 * eta:g}-seed{seed}"
            runs.append(record_run(place, seed=seed, eta=eta, gains=(eta, 0.3), max_steps=9 + seed))
    write_report(runs, folder / "page.html")
    page, messages = browser.new_page(viewport={"width": 1200, "height": 800}), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto((folder / "page.html").as_uri())
    page.evaluate("ready.then(renderAll)")
    yield page
    page.close()
    assert not messages


def rows(page):
    return page.locator("#runs-table tbody th[scope=row]").all_inner_texts()


def lines(page, title):
    """Return the names of the lines of a plot, without the part after the name of the line."""
    names = page.evaluate(
        f"({MANY})([...document.querySelectorAll('.plot')].find((p) => p.dataset.title === "
        f"'{title}'))"
    )
    return [name.partition(":")[0] for name in names]


@pytest.mark.slow
def test_runs_are_sorted_filtered_grouped_and_selected(opened):
    page = opened
    assert rows(page) == ["averaged", "base × 3 seeds"]  # the sweep is closed
    page.locator("#runs-table .sweep button").click()
    assert rows(page)[2:] == ["eta3 × 2 seeds", "eta5 × 2 seeds"]
    assert (
        "2 recipes, 4 runs, largest gain +0.400: eta5"
        in page.locator("#runs-table .sweep").inner_text()
    )
    gains = page.locator("#runs-table thead button", has_text="Gain")
    gains.click()
    assert rows(page)[:2] == ["averaged", "base × 3 seeds"]  # the largest first
    gains.click()
    assert rows(page)[:2] == ["base × 3 seeds", "averaged"]
    base = page.locator("#runs-table tr", has_text="base × 3").locator("td").all_inner_texts()
    # of the seed
    assert "+0.200 (+0.150 to +0.250)" in base and "0, 1, 2" not in base and "3 values" in base
    assert lines(page, "Gradient norm") == [
        "base (mean of 3)",
        "averaged",
        "eta3 (mean of 2)",
        "eta5 (mean of 2)",
    ]
    page.locator("#runs-table input[aria-label='show sweep sweep']").click()
    page.evaluate("renderAll()")
    assert lines(page, "Gradient norm") == ["base (mean of 3)", "averaged"]
    page.locator("#grouped").uncheck()
    page.evaluate("renderAll()")
    assert len(rows(page)) == 8 and lines(page, "Gradient norm") == [
        "base-seed0",
        "base-seed1",
        "base-seed2",
        "averaged",
    ]
    page.locator("#runs details summary").first.click()
    page.locator("#filters select[data-setting=seed]").select_option("=1")
    assert sorted(rows(page)) == ["base-seed1", "eta3-seed1", "eta5-seed1"]
    page.locator("#filter").fill("eta=0.5")
    assert rows(page) == ["eta5-seed1"]
    page.evaluate("renderAll()")
    assert lines(page, "Gradient norm") == ["eta5-seed1"]
    page.locator("#filter").fill("")
    page.locator("#filters select[data-setting=seed]").select_option("")
    page.locator("#grouped").check()
    page.evaluate("renderAll()")


@pytest.mark.slow
def test_different_rewards_have_an_axis_each_and_a_sentence(opened):
    titles = opened.locator("#rewards-differ ~ .curve figcaption").all_inner_texts()
    assert len(titles) == 2 and all(title.startswith("Reward, miniature: VQ ") for title in titles)
    assert "trained with 2 different rewards" in opened.locator("#rewards-differ").inner_text()
    of = {title: lines(opened, title.partition(" solid")[0].strip()) for title in titles}
    # rollouts and validations of one run, and of three recipes
    assert sorted(map(len, of.values())) == [2, 6]
    assert "averaged" in min(of.values(), key=len)[0]


@pytest.mark.slow
def test_plots_share_a_cursor_and_have_smoothing_and_logarithmic_axes(opened):
    plot = (
        "[...document.querySelectorAll('.plot')].find((p) => p.dataset.title === 'Gradient norm')"
    )
    norms = f"{plot}.data.find((trace) => trace.hoverinfo !== 'skip').y"
    assert opened.evaluate(norms) == pytest.approx([1.1, 1.2, 1.3])
    opened.locator("#smoothing").fill("0.5")
    opened.evaluate("renderAll()")
    smoothed = opened.evaluate(norms)
    assert smoothed == pytest.approx(
        [1.1, (0.25 * 1.1 + 0.5 * 1.2) / 0.75, 1.0 * (0.125 * 1.1 + 0.25 * 1.2 + 0.65) / 0.875]
    )
    opened.locator("#log-y").check()
    opened.evaluate("renderAll()")
    assert opened.evaluate(f"{plot}.layout.yaxis.type") == "log"
    opened.locator("#log-y").uncheck()
    opened.locator("#smoothing").fill("0")
    opened.evaluate("renderAll()")
    opened.locator("#trust .plot").first.scroll_into_view_if_needed()
    box = opened.locator("#trust .plot .nsewdrag").first.bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    opened.wait_for_function(
        "[...document.querySelectorAll('.cursor')].filter((line) => !line.hidden).length >= 2"
    )
    opened.mouse.move(5, 5)
    opened.wait_for_function(
        "[...document.querySelectorAll('.cursor')].every((line) => line.hidden)"
    )


@pytest.mark.slow
def test_rewards_are_histograms_by_iteration(opened):
    plot = (
        "[...document.querySelectorAll('.plot')].find((p) => p.dataset.title === 'Rewards of the "
        "rollouts')"
    )
    z = opened.evaluate(f"{plot}.data[0].z")
    sums = [sum(column) for column in zip(*z)]
    assert sums == pytest.approx([100, 100, 100])  # % of the rollouts of each iteration
    first = [row[0] for row in z]
    assert first[0] > 0 and first[-1] == 0  # the rewards of the first iteration are the lowest ones
