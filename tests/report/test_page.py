"""The report page, as text and in a browser."""

import json
import re
from html import unescape

import pytest

from hyvideo.report import page
from hyvideo.report.clips import MAX_POSTER_BYTES, embed
from hyvideo.report.page import write_report
from tests.report.recorded_runs import HOSTILE, record_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run and of two."""
    folder = tmp_path_factory.mktemp("report")
    first = record_run(
        folder / "first",
        gains=(0.2, -0.1, 0.3),
        clocks=(10.0, 11.0, 21.0),
        missing=3,
        negative_prompt="Blur",
    )
    second = record_run(
        folder / "second", gains=(0.4, 0.3), eta=0.3, negative_prompt="blur", validations=(0, 2, 3)
    )
    write_report([first], folder / "one.html")
    write_report([first, second], folder / "two.html")
    return {name: folder / f"{name}.html" for name in ("one", "two")}


def test_a_run_with_a_custom_sampler_and_objective_is_shown_without_their_files(tmp_path):
    file = tmp_path / "gone.py"
    file.write_text(
        "from examples.custom_objective import WeightedRegression as Mine\n"
        "def linear(sigma, sigma_next, eta, second):\n    return eta\n"
    )
    run = record_run(tmp_path / "run", objective=f"{file}:Mine", sde_type=f"{file}:linear")
    file.unlink()
    write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"<dd>Mine, {tmp_path}/gone.py:linear rollouts" in text


def test_runs_of_different_objectives_are_shown_and_compared(tmp_path):
    nft = {"objective": "nft", "nft_levels": 2, "eta": 0.0}
    distill = {"objective": "distill", "anchor_cfg_scale": 3.0, "eta": 0.0, "cfg_scale": 1.0}
    changes = {"grpo": {}, "nft": nft, "draft": nft | {"objective": "draft"}, "distill": distill}
    runs = [record_run(tmp_path / name, **settings) for name, settings in changes.items()]
    for run in runs:
        write_report([run], tmp_path / "one.html")
    write_report(runs, tmp_path / "all.html")
    data, _ = data_of(tmp_path / "all.html")
    found = {name: run["settings"]["objective"] for name, run in data["runs"].items()}
    assert found == {name: name for name in changes}
    assert data["runs"]["nft"]["settings"]["nft_levels"] == "2"


def test_prompts_are_escaped(pages):
    for file in pages.values():
        assert HOSTILE.partition("window")[0] not in file.read_text(encoding="utf-8")
        data, _ = data_of(file)
        assert HOSTILE in {
            video["prompt"] for run in data["runs"].values() for video in run["videos"]
        }


def data_of(file):
    """Return the data in a page, and the sentence about its videos."""
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) < page.MAX_PAGE_BYTES
    data = text[text.index('id="data">') + 10 :]
    note = re.search(r'id="kept" class="quiet">(.*?)</span>', text)[1]
    return json.JSONDecoder().raw_decode(data)[0], unescape(note)


def test_videos_that_do_not_fit_are_counted_and_the_extremes_are_shown_first(tmp_path, monkeypatch):
    folder = record_run(tmp_path / "run", last=7, gains=(0.1, -0.5, 0.2, 0.2, 0.2, 0.2, 0.9, 0.2))
    sizes = [file.stat().st_size for file in folder.glob("samples/*/*.mp4")]
    monkeypatch.setattr(page, "NUM_EXTREMES", 1)
    monkeypatch.setattr(
        page, "embed", lambda rows, room: embed(rows, 6 * (max(sizes) + MAX_POSTER_BYTES))
    )
    write_report([folder], folder / "report.html")
    data, note = data_of(folder / "report.html")
    shown = [video["number"] for video in data["runs"]["run"]["videos"] if "clip" in video["after"]]
    assert shown[0] == 1 and shown[-1] == 6 and len(shown) == 3
    assert note.startswith("8 of 8 validation videos") and " 3 of them" in note


def test_a_run_of_10_000_iterations_has_a_page_of_limited_size(tmp_path):
    folder = record_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbered = (
        {**lines[k % 3], "iteration": k, "time/since_start": 9.0 * k} for k in range(1, 10_001)
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in numbered))
    write_report([folder], tmp_path / "page.html")
    data, _ = data_of(tmp_path / "page.html")
    assert len((tmp_path / "page.html").read_bytes()) < 4e6
    drawn = data["runs"]["run"]["metrics"]["iteration"]
    assert drawn[0] == 20 and drawn[-1] == 10_000 and len(drawn) == 500


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(browser, pages, request):
    """A page in light or dark mode, which must make no request and log no message."""
    name, scheme = request.param
    page, messages = browser.new_page(color_scheme=scheme), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request",
        lambda sent: sent.url.startswith(("file:", "data:", "blob:")) or messages.append(sent.url),
    )
    page.goto(pages[name].as_uri())
    yield page
    assert not messages
    page.close()


@pytest.mark.system
@pytest.mark.parametrize(
    "opened",
    [("one", "light")],
    indirect=True,
)
def test_a_browser_draws_plots_plays_videos_and_handles_keys(opened):
    page = opened
    page.evaluate("plotly.then(renderAll)")  # not only those near the screen
    open_plots = "[...document.querySelectorAll('.plot')].filter((plot) => plot.checkVisibility())"
    marks = "plot.querySelectorAll('.trace, .hm').length"
    drawn = f"{open_plots}.map((plot) => plot.classList.contains('constant') ? 1 : {marks})"
    page.wait_for_function(f"{drawn}.length >= 11 && Math.min(...{drawn}) > 0")
    constant = page.locator(".plot.constant")  # in words
    assert constant.count() > 1
    assert all("in every iteration" in text or ":" in text for text in constant.all_inner_texts())
    assert page.locator(".curve figcaption").inner_text().startswith("Reward")
    of_cost = "[...document.querySelectorAll('#cost .plot:not(.constant)')]"
    plots = f"{of_cost}.flatMap((plot) => plot.data)"
    is_stage = "each.type == 'bar' && each.orientation != 'h'"
    stages = f"{plots}.filter((each) => {is_stage}).map((each) => each.name)"
    # together the seconds of the iteration, so without CPU seconds and the process's age
    assert page.evaluate(stages) == ["rollout", "update"]
    page.locator("#gallery article").first.scroll_into_view_if_needed()
    first = (
        "[...document.querySelectorAll('#gallery article:first-child video')].map((clip) => "
        "clip.currentTime)"
    )
    page.wait_for_function(f"Math.min(...{first}) > 0.1")
    times = page.evaluate(first)
    assert len(times) > 1 and max(times) - min(times) < 0.3
    page.keyboard.press("k")
    assert page.evaluate("[...document.querySelectorAll('video')].every((clip) => clip.paused)")
    page.locator("#order").focus()
    page.keyboard.press("End")
    in_order = page.locator("#gallery h3").all_inner_texts()
    assert in_order[0] == HOSTILE and len(in_order) == 3
    page.keyboard.press("Home")  # the worst first: its reward fell by 0.1 in one run
    assert page.locator("#gallery h3").first.inner_text() == "prompt 0"
    assert page.evaluate("window.hacked") is None
    assert page.locator("#pareto .plot .xtitle").text_content() == "reward (trained)"
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth == 390")


@pytest.mark.system
@pytest.mark.parametrize("opened", [("one", "dark")], indirect=True)
def test_a_print_has_all_plots_within_its_width(opened):
    """A report is saved as PDF: wide plots were cut at the edge of the paper, which has 700 pixels."""
    opened.set_viewport_size({"width": 1280, "height": 800})
    opened.evaluate("plotly.then(() => dispatchEvent(new Event('beforeprint')))")
    widths = "[...document.querySelectorAll('.plot .main-svg')].map((each) => each.clientWidth)"
    assert max(opened.evaluate(widths)) <= 700
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert max(opened.evaluate(widths)) > 1000


@pytest.mark.system
@pytest.mark.parametrize("opened", [("two", "light")], indirect=True)
def test_videos_of_two_runs_are_beside_their_common_base(opened):
    texts = opened.locator("#gallery article:first-child figcaption").all_inner_texts()
    assert [text.partition(":")[0] for text in texts] == ["before", "first", "second"]
    chips = opened.locator("#gallery article:first-child .chips")
    assert chips.nth(1).locator("b").first.inner_text() == "+0.300"
