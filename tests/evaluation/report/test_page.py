"""The report page, as text and in a browser."""

import re
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from hyvideo.evaluation.report.contents import read_run
from hyvideo.evaluation.report.page import __file__ as page_file
from hyvideo.evaluation.report.page import page_data, write_report
from tests.evaluation.report.recorded_runs import HOSTILE, record_run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run and of two."""
    folder = tmp_path_factory.mktemp("report")
    first = record_run(
        folder / "first", gains=(0.2, -0.1, 0.3), clocks=(10.0, 11.0, 21.0), missing=3, negative_prompt="Blur"
    )
    second = record_run(folder / "second", gains=(0.4, 0.3), eta=0.3, negative_prompt="blur")
    write_report([first], folder / "one.html")
    write_report([first, second], folder / "two.html")
    return {name: folder / f"{name}.html" for name in ("one", "two")}


def test_the_page_shows_restarts_missing_rewards_and_settings(pages):
    text = pages["one"].read_text(encoding="utf-8")
    assert "restarted before iteration 2<" in text  # one second after an iteration of nine seconds
    assert re.search(r"3 of \d+ rewards are missing", text) and "the service was away" in text
    assert "<code>eta</code></th><td>0.7</td><td>" in text
    assert "<code>prompts_csv</code></th><td>assets/miniature/prompts/train.csv</td>" in text
    assert "closest to its limit: held_out/motion, 20 %" in text
    assert "<dd>GRPO, sage_grpo rollouts, eta 0.7, trust region " in text and "24 rollouts, 27 s on 1 × " in text
    assert "<code>eta</code></th><td>0.7</td><td>0.3</td>" in pages["two"].read_text(encoding="utf-8")
    assert "<td>Blur</td><td>blur</td>" in pages["two"].read_text(encoding="utf-8")


def test_prompts_are_escaped(pages):
    for page in pages.values():
        text = page.read_text(encoding="utf-8")
        assert HOSTILE.partition("window")[0] not in text and "49" not in text.partition('"prompt": ')[2][:120]


def test_large_videos_are_left_out_to_limit_the_page_size(tmp_path):
    folder = record_run(tmp_path / "run", last=7)
    for clip in folder.glob("samples/*/*.mp4"):
        clip.write_bytes(bytes([int(clip.stem)]) * 400_000 + clip.parent.name.encode() * 100_000)
    write_report([folder], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(text) < 15e6 and 0 < text.count('"clip": ') < 16
    next(folder.glob("samples/000003/*.mp4")).unlink()  # deleted to save disk space
    write_report([folder], tmp_path / "page.html")


def test_a_long_run_is_thinned_and_keeps_its_last_iteration(tmp_path):
    run = read_run(record_run(tmp_path / "run"))
    run.lines[:] = [{"iteration": number} for number in range(1, 1202)]
    run.hours[:] = range(1201)
    drawn = page_data(run, 1)["metrics"]["iteration"]
    assert drawn[0] == 1 and drawn[-1] == 1201 and len(drawn) <= 501


@pytest.mark.parametrize(
    "file, content", [("samples/000000/scores.json", '[{"number": 0}]'), ("metrics.jsonl", '{"iteration": 1}\n')]
)
def test_corrupted_records_raise_value_error_with_the_folder(tmp_path, file, content):
    folder = record_run(tmp_path / "run")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=f"{folder}: the records of a run are corrupted"):
        write_report([folder], tmp_path / "page.html")


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(browser, pages, request):
    """A page in light or dark mode, which must make no request and log no message."""
    name, scheme = request.param
    page, messages = browser.new_page(color_scheme=scheme), []
    page.set_default_timeout(120_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(("file:", "data:", "blob:")) or messages.append(sent.url))
    page.goto(pages[name].as_uri())
    yield page
    assert not messages
    page.close()


@pytest.mark.parametrize(
    "opened", [("one", "light"), pytest.param(("two", "dark"), marks=pytest.mark.slow)], indirect=True
)
def test_a_browser_draws_plots_plays_videos_and_handles_keys(opened):
    page = opened
    drawn = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.trace, .hm').length)"
    page.wait_for_function(f"{drawn}.length >= 13 && Math.min(...{drawn}) > 0")
    assert page.locator(".curve figcaption").inner_text().startswith("Reward")
    assert page.locator("#steps .hm").count() == 3
    assert page.locator("#timeline .trace").count() == 2 and page.locator("#timeline .point").count() == 3
    assert "scoring, 2 s" in page.locator("#timeline .ytick").all_text_contents()
    assert {"TFLOP/s", "MFU"} <= {
        title.split()[0].strip(":") for title in page.locator("#cost figcaption").all_inner_texts()
    }
    page.locator(".glance article").first.scroll_into_view_if_needed()
    first = "[...document.querySelectorAll('.glance article:first-child video')].map((clip) => clip.currentTime)"
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
    page.locator("#axis").select_option("hours")
    assert page.locator("#trust .xtitle").first.text_content() == "hours"
    assert page.locator("#pareto .plot .xtitle").text_content() == "reward (trained)"
    page.locator("#still summary").click()
    unmoved = page.locator("#still li").all_inner_texts()
    values = {re.sub("first: [a-z]+ |,.*", "", line) for line in unmoved}
    assert {"KL coefficient: 0.25", "Clip fraction: 0"} <= values
    assert page.locator("#still summary").inner_text() == f"{len(unmoved)} measures did not move"
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth == 390")


@pytest.mark.slow
@pytest.mark.parametrize("opened", [("two", "light")], indirect=True)
def test_numbers_have_the_same_form_in_the_template_and_in_the_script(opened):
    values = [0, 1.7, -0.0514, 0.000463, -0.000463, 2.109e-5, 123.4, -1234.5, 0.1, 99.9994]
    folder = Path(page_file).parent
    template = Environment(loader=FileSystemLoader(folder)).get_template("formats.html.j2").module
    assert opened.evaluate(f"{values}.map(format)") == [template.score(value) for value in values]
    assert opened.evaluate(f"{values}.map(signed)") == [template.signed(value) for value in values]


@pytest.mark.parametrize("opened", [("two", "light")], indirect=True)
def test_two_runs_share_one_video_of_the_same_base(opened):
    titles = opened.locator("#gallery article:first-child figcaption").all_inner_texts()
    assert [title.partition(":")[0] for title in titles] == ["before", "first", "second"]
