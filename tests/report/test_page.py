"""The report page, as text and in a browser."""

import json
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from jinja2 import Environment, FileSystemLoader

from hyvideo.report import page
from hyvideo.report.clips import MAX_POSTER_BYTES, embed
from hyvideo.report.page import __file__ as page_file
from hyvideo.report.page import write_report
from tests.full_size import copy_distinct
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


def test_the_page_shows_restarts_missing_rewards_and_settings(pages):
    text = pages["one"].read_text(encoding="utf-8")
    assert "restarted before iteration 2<" in text  # one second after an iteration of nine seconds
    assert re.search(r"3 of \d+ rewards are missing", text) and "the service was away" in text
    assert "<code>eta</code></th><td>0.7</td><td>" in text
    assert "<code>prompts_csv</code></th><td>assets/miniature/prompts/train.csv</td>" in text
    assert "closest to its limit: held_out/motion, 20 %" in text
    assert (
        "<dd>GRPO, sage_grpo rollouts, eta 0.7, trust region " in text
        and "24 rollouts, 27 s on 1 × " in text
    )
    data, _ = data_of(pages["two"])
    assert {"eta", "negative_prompt"} <= {*data["settings"]} and "output_dir" not in data[
        "settings"
    ]
    assert [run["settings"]["eta"] for run in data["runs"].values()] == ["0.7", "0.3"]
    assert [run["settings"]["negative_prompt"] for run in data["runs"].values()] == ["Blur", "blur"]


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


def entries_of(data):
    """Return number and entry of all videos that are saved."""
    videos = [video for run in data["runs"].values() for video in run["videos"]]
    return [
        (video["number"], entry)
        for video in videos
        for entry in (video["before"], video["after"])
        if entry["file"]
    ]


@pytest.mark.slow
def test_full_size_videos_are_shown_as_previews_with_links_to_the_files(full, tmp_path):
    """One of them is a small clip, which is shown as it is."""
    folder = record_run(tmp_path / "run", last=3)
    for clip in folder.glob("samples/*/00[123].mp4"):
        clip.write_bytes(full.read_bytes())
    (tmp_path / "pages").mkdir()
    write_report([folder], tmp_path / "pages" / "page.html")
    data, note = data_of(tmp_path / "pages" / "page.html")
    entries = entries_of(data)
    assert len(entries) == 8
    assert all(
        entry["clip"] in data["clips"] and entry["clip"] in data["posters"] for _, entry in entries
    )
    assert {number for number, entry in entries if entry["clip"] in data["originals"]} == {1, 2, 3}
    for _, entry in entries:
        assert (
            tmp_path / "pages" / unquote(entry["file"])
        ).resolve().parent.parent == folder / "samples"
    assert str(tmp_path) not in json.dumps(entries)  # links stay valid if the folder is moved
    assert note == (
        "4 of 8 validation videos are shown (log_num_videos), selected before scoring. Large "
        "videos are shown as previews; the link below a preview opens the file."
    )


@pytest.mark.slow
def test_the_page_distinguishes_unsaved_videos_from_those_that_it_cannot_show(tmp_path):
    unsaved = record_run(tmp_path / "unsaved", last=-1)
    write_report([unsaved], tmp_path / "page.html")
    assert data_of(tmp_path / "page.html")[1] == (
        "No videos are saved; log_num_videos sets how many a validation saves."
    )
    broken = record_run(tmp_path / "broken", last=1)
    for clip in broken.glob("samples/*/*.mp4"):
        clip.write_bytes(bytes(6_000_000))
    write_report([broken], broken / "report.html")
    assert data_of(broken / "report.html")[1] == (
        "2 of 8 validation videos are saved in samples/000000, samples/000003, but none of them "
        "can be shown: they cannot be read or are too large for this page."
    )
    next(broken.glob("samples/000003/*.mp4")).unlink()  # deleted to save disk space
    write_report([broken], broken / "report.html")


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
    assert note == (
        "8 of 8 validation videos are saved in samples/000000, samples/000003; this page shows the "
        "3 of them that fit."
    )


def test_runs_share_the_room_and_show_the_same_videos(tmp_path, monkeypatch):
    runs = [
        record_run(tmp_path / name, last=7, gains=gains)
        for name, gains in (("a", (0.1, 0.2)), ("b", (0.3, 0.0)))
    ]
    sizes = [file.stat().st_size for run in runs for file in run.glob("samples/*/*.mp4")]
    monkeypatch.setattr(
        page, "embed", lambda rows, room: embed(rows, 8 * (max(sizes) + MAX_POSTER_BYTES))
    )
    write_report(runs, tmp_path / "page.html")
    data, note = data_of(tmp_path / "page.html")
    shown = [
        {
            video["number"]
            for video in run["videos"]
            if "clip" in video["before"] and "clip" in video["after"]
        }
        for run in data["runs"].values()
    ]
    assert len(shown[0]) == 2 and shown[0] == shown[1]
    assert "this page shows the 2 of them that fit" in note


def test_videos_of_many_runs_are_shown_run_by_run_if_those_of_all_do_not_fit(tmp_path, monkeypatch):
    runs = [
        record_run(tmp_path / name, last=0, gains=gains)
        for name, gains in (("a", (0.1, 0.2)), ("b", (0.3, 0.0)))
    ]
    sizes = [file.stat().st_size + MAX_POSTER_BYTES for file in runs[0].glob("samples/*/*.mp4")]
    monkeypatch.setattr(page, "embed", lambda rows, room: embed(rows, sum(sizes) + 100))
    monkeypatch.setattr(page, "MAX_DETAILED_RUNS", 1)
    write_report(runs, tmp_path / "page.html")
    data, _ = data_of(tmp_path / "page.html")
    # others are not even listed
    assert [len(run["videos"]) for run in data["runs"].values()] == [1, 0]


@pytest.mark.slow
def test_a_comparison_of_four_runs_shows_all_their_full_size_videos(full, tmp_path):
    folders = [record_run(tmp_path / f"run{number}", last=2) for number in range(4)]
    for number, clip in enumerate(sorted(tmp_path.glob("run?/samples/000003/*.mp4"))):
        copy_distinct(full, clip, number)
        base = clip.parents[1] / "000000" / clip.name
        copy_distinct(full, base, 100 + int(clip.stem))
    write_report(folders, tmp_path / "page.html")
    data, note = data_of(tmp_path / "page.html")
    entries = entries_of(data)
    assert len(entries) == 24 and all("clip" in entry for _, entry in entries)
    assert len(data["originals"]) == 4 * 3 + 3 and note.startswith(
        "3 of 8 validation videos are shown"
    )


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
    assert "A point of a line stands for up to 20 iterations" in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "file, content",
    [("samples/000000/scores.json", '[{"number": 0}]'), ("metrics.jsonl", '{"iteration": 1}\n')],
)
def test_corrupted_records_raise_value_error_with_the_folder(tmp_path, file, content):
    folder = record_run(tmp_path / "run")
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=f"{folder}: the records of a run are corrupted"):
        write_report([folder], tmp_path / "page.html")


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
    [("one", "light"), pytest.param(("two", "dark"), marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_browser_draws_plots_plays_videos_and_handles_keys(opened):
    page = opened
    page.evaluate("plotly.then(renderAll)")  # not only those near the screen
    open_plots = "[...document.querySelectorAll('.plot')].filter((plot) => plot.checkVisibility())"
    drawn = f"{open_plots}.map((plot) => plot.querySelectorAll('.trace, .hm').length)"
    page.wait_for_function(f"{drawn}.length >= 11 && Math.min(...{drawn}) > 0")
    assert page.locator(".curve figcaption").inner_text().startswith("Reward")
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


@pytest.mark.slow
@pytest.mark.parametrize("opened", [("one", "light")], indirect=True)
def test_a_browser_draws_the_stages_and_steps_of_one_run(opened):
    page = opened
    page.evaluate("plotly.then(renderAll)")
    assert page.locator("#steps .hm").count() == 3
    assert page.locator("#timeline .trace").count() == 2
    assert page.locator("#timeline .point").count() == 3
    assert "scoring, 2 s" in page.locator("#timeline .ytick").all_text_contents()
    titles = page.locator("#cost figcaption").all_inner_texts()
    assert {"TFLOP/s", "MFU"} <= {title.split()[0].strip(":") for title in titles}


@pytest.mark.slow
@pytest.mark.parametrize("opened", [("two", "light")], indirect=True)
def test_numbers_have_the_same_form_in_the_template_and_in_the_script(opened):
    values = [0, 1.7, -0.0514, 0.000463, -0.000463, 2.109e-5, 123.4, -1234.5, 0.1, 99.9994]
    folder = Path(page_file).parent
    template = Environment(loader=FileSystemLoader(folder)).get_template("formats.html.j2").module
    assert opened.evaluate(f"{values}.map(format)") == [template.score(value) for value in values]
    assert opened.evaluate(f"{values}.map(signed)") == [template.signed(value) for value in values]


@pytest.mark.system
@pytest.mark.parametrize("opened", [("two", "light")], indirect=True)
def test_videos_of_two_runs_are_beside_their_common_base(opened):
    texts = opened.locator("#gallery article:first-child figcaption").all_inner_texts()
    assert [text.partition(":")[0] for text in texts] == ["before", "first", "second"]
    chips = opened.locator("#gallery article:first-child .chips")
    assert chips.nth(1).locator("b").first.inner_text() == "+0.300"
