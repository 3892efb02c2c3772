"""The page of several runs in a browser: table of runs, and different rewards."""

import pytest

from hyvideo.report.page import write_report
from tests.report.recorded_runs import record_run


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A page of two runs of one reward and a run of another one."""
    folder = tmp_path_factory.mktemp("many")
    record_run(folder / "low", seed=1, gains=(0.1, 0.3))
    record_run(folder / "high", seed=2, eta=0.3, gains=(0.5, 0.6))
    record_run(folder / "averaged", reward_weights="averaged", gains=(0.9,))
    write_report([folder], folder / "page.html")
    page, messages = browser.new_page(viewport={"width": 1200, "height": 800}), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto((folder / "page.html").as_uri())
    page.evaluate("plotly.then(renderAll)")
    yield page
    page.close()
    assert not messages


def rows(page):
    return page.locator("#runs-table tbody th[scope=row]").all_inner_texts()


def lines(page, title):
    """Return the names of the runs that a plot shows."""
    plots = "[...document.querySelectorAll('.plot')]"
    names = page.evaluate(
        f"{plots}.find((plot) => plot.dataset.title === {title!r}).data.map((trace) => trace.name)"
    )
    return [name.partition(":")[0] for name in names]


@pytest.mark.slow
def test_runs_are_sorted_filtered_and_selected(opened):
    page = opened
    assert rows(page) == ["averaged", "high", "low"]
    gains = page.locator("#runs-table thead button", has_text="Gain")
    gains.click()
    assert rows(page) == ["averaged", "high", "low"]  # the largest first
    gains.click()
    assert rows(page) == ["low", "high", "averaged"]
    page.locator("#runs-table input[aria-label='show low']").click()
    page.evaluate("renderAll()")
    assert lines(page, "Gradient norm") == ["averaged", "high"]
    page.locator("#filter").fill("eta=0.3")
    page.evaluate("renderAll()")
    assert rows(page) == ["high"] and lines(page, "Gradient norm") == ["high"]
    page.locator("#filter").fill("")
    page.evaluate("renderAll()")
