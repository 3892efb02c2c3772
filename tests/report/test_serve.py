"""The server of the runs in a folder, over real connections, and its pages in a browser."""

import gzip
import http.client
import json
import os
import shutil
import socket
import struct
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from hyvideo.report.serve import TOKEN_VARIABLE, Library, Server, find_runs, is_local
from scripts import report
from tests.report.recorded_runs import HOSTILE, record_run


@contextmanager
def serving(folder, host="127.0.0.1"):
    server = Server(Library(folder), host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server, path, method="GET", **headers):
    """Request a path and return status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def data_in(content):
    text = content.decode()
    return json.JSONDecoder().raw_decode(text[text.index('id="data">') + 10 :])[0]


def test_a_browser_that_resets_its_connection_prints_nothing(tmp_path, capfd):
    with serving(tmp_path) as server:
        browser = socket.create_connection(server.server_address)
        # close with a reset
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.close()
        assert get(server, "/")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with a run of a hostile name, a sweep of two seeds, and a run whose records are
    corrupted.
    """
    folder = tmp_path_factory.mktemp("serve") / "outputs"
    record_run(
        folder / "<img src=x onerror=window.hacked=1>", gains=(0.4, 0.3), validations=(0, 2, 3)
    )
    for seed in range(2):
        record_run(
            folder / "recipes" / "cells" / f"sage-seed{seed}", seed=seed, gains=(0.1 * seed, 0.3)
        )
    broken = record_run(folder / "broken")
    (broken / "metrics.jsonl").write_text('{"iteration": 1}\n')
    return folder


@pytest.fixture(scope="module")
def server(outputs):
    with serving(outputs) as started:
        yield started


def test_runs_are_found_below_the_folder_but_not_in_one_another(outputs):
    names = [path.relative_to(outputs).as_posix() for path in find_runs(outputs)]
    assert (
        names[1:] == ["broken", "recipes/cells/sage-seed0", "recipes/cells/sage-seed1"]
        and len(names) == 4
    )
    assert find_runs(outputs / "broken") == [outputs / "broken"]


def test_the_first_page_has_all_runs_and_names_one_that_cannot_be_read(server):
    status, headers, content = get(server, "/")
    data = data_in(content)
    assert status == 200 and len(data["runs"]) == 3 and data["served"]
    assert data["runs"]["sage-seed0"]["sweep"] == "recipes"
    assert data["runs"]["sage-seed0"]["group"] == data["runs"]["sage-seed1"]["group"] == "sage"
    assert data["runs"]["sage-seed0"]["status"] == "finished, 3 iterations"
    assert "broken cannot be read: " in content.decode()
    assert "<img src=x" not in content.decode()
    assert headers["X-Frame-Options"] == "DENY"
    packed = get(server, "/", Accept_Encoding="gzip")
    assert packed[1]["Content-Encoding"] == "gzip" and gzip.decompress(packed[2]) == content


def test_a_page_is_sent_again_only_if_a_run_has_changed(outputs):
    with serving(outputs) as server:
        _, headers, _ = get(server, "/run?name=sage-seed1")
        stamp = headers["ETag"]
        assert get(server, "/run?name=sage-seed1", If_None_Match=stamp)[::2] == (304, b"")
        run = outputs / "recipes/cells/sage-seed1"
        (run / "notes.txt").write_text("started with <b>the</b> wrong prompts")
        status, headers, content = get(server, "/run?name=sage-seed1", If_None_Match=stamp)
        assert status == 200 and headers["ETag"] != stamp
        assert "started with &lt;b&gt;the&lt;/b&gt; wrong prompts" in content.decode()
        (run / "notes.txt").unlink()


def test_a_run_is_running_while_its_heartbeat_is_young(tmp_path):
    folder = record_run(tmp_path / "run", max_steps=10)
    with serving(tmp_path) as server:
        assert (
            data_in(get(server, "/run?name=run")[2])["runs"]["run"]["status"]
            == "not running, iteration 3 of 10"
        )
        (folder / ".owner").write_text("{}")
        found = get(server, "/run?name=run")[2]
        # 10 s each
        assert data_in(found)["runs"]["run"]["status"] == "running, iteration 3 of 10, 70 s left"
        health = get(server, "/health?name=run")[2].decode()
        assert "no iteration has ended" not in health
        long_ago = time.time() - 120
        os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
        health = get(server, "/health?name=run")[2].decode()
        assert "no iteration has ended for 2 min; the recent ones took 10 s each" in health


def test_only_videos_of_the_pages_are_sent_also_in_parts(server, outputs):
    _, _, content = get(server, "/run?name=sage-seed0")
    video = data_in(content)["runs"]["sage-seed0"]["videos"][0]["entries"]["0"]
    file = (outputs / "recipes/cells/sage-seed0/samples/000000/000.mp4").read_bytes()
    whole = get(server, f"/clip?id={video['clip']}")
    assert whole[0] == 200 and whole[1]["Content-Type"] == "video/mp4"
    part = get(server, f"/{video['file']}", Range="bytes=10-19")
    assert (
        part[0] == 206
        and len(part[2]) == 10
        and part[1]["Content-Range"].startswith("bytes 10-19/")
    )
    assert get(server, f"/clip?id={video['clip']}", Range=f"bytes={len(whole[2])}-")[0] == 416
    assert file in {get(server, f"/clip?id={each}")[2] for each in server.library.files}
    assert get(server, f"/poster?id={video['clip']}")[2][:4] == b"RIFF"
    for path in (
        "/clip?id=0",
        "/file?id=../broken/config.yaml",
        "/config.yaml",
        "/run?name=nowhere",
        "/clip",
    ):
        assert get(server, path)[0] == 404
    assert get(server, "/", method="POST")[0] == 501


def test_a_page_of_another_site_cannot_read_the_server_under_its_own_name(server):
    port = server.server_address[1]
    assert get(server, "/", Host=f"attacker.example:{port}")[0] == 403
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9000", f"[::1]:{port}"):
        assert get(server, "/", Host=host)[0] == 200


def test_an_address_that_others_can_reach_needs_the_token(outputs, monkeypatch):
    assert is_local("localhost") and is_local("127.0.0.2") and is_local("::1")
    assert not is_local("0.0.0.0") and not is_local("::") and not is_local("node7")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with serving(outputs, "0.0.0.0") as server:
        assert server.url.endswith("/?token=secret")
        assert (
            get(server, "/")[0]
            == get(server, "/?token=secre")[0]
            == get(server, "/plotly.js")[0]
            == 401
        )
        status, headers, _ = get(server, "/health?name=sage-seed0&token=secret")
        assert status == 303 and headers["Location"] == "/health?name=sage-seed0"
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert (
            get(server, "/", Cookie=cookie)[0] == 200
            and get(server, "/", Cookie=f"{cookie}x")[0] == 401
        )


def test_nothing_is_written_to_the_folder(tmp_path):
    record_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with serving(tmp_path) as server:
        for path in ("/", "/run?name=run", "/health?name=run", "/plotly.js"):
            assert get(server, path)[0] == 200
        for digest in [*server.library.files]:
            get(server, f"/clip?id={digest}"), get(server, f"/poster?id={digest}")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_metrics_to_look_at_first_need_attention_when_they_are_outside_their_range(tmp_path):
    record_run(tmp_path / "calm")
    record_run(tmp_path / "bad", gains=(-0.2, -0.3))
    lines = (tmp_path / "bad/metrics.jsonl").read_text().splitlines()
    changed = json.loads(lines[-1]) | {
        "nft/ratio_first_deviation": 0.5,
        "grad/spike": 30.0,
        "validation/reward": 0.1,
    }
    changed |= {"reward/std": 0.0}
    (tmp_path / "bad/metrics.jsonl").write_text(
        "\n".join([*lines[:-1], json.dumps(changed)]) + "\n"
    )
    with serving(tmp_path) as server:
        assert "<b>" not in get(server, "/health?name=calm")[2].decode().partition("<script")[0]
        text = get(server, "/health?name=bad")[2].decode()
    for problem in (
        "all rewards of a group are equal: no gradient",
        "rollouts and training disagree",
        "above 10 in a recent iteration",
        "below the base model",
    ):
        assert problem in text


def test_the_command_needs_a_folder_of_runs_and_a_free_port(tmp_path, exit_code, capsys, server):
    assert exit_code(report.main, "--serve", tmp_path / "nowhere") == 2
    assert "--serve needs a folder with runs" in capsys.readouterr().err
    port = server.server_address[1]
    assert exit_code(report.main, "--serve", tmp_path, "--port", port) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert exit_code(report.main, "--serve", tmp_path, "--port", 70_000) == 2
    assert "port 70000" in capsys.readouterr().err
    assert exit_code(report.main, "--serve", tmp_path, "--output_path", "a.html") == 2
    assert "--serve writes no file, got a.html" in capsys.readouterr().err


# --- in a browser ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_browser_keeps_its_place_while_a_run_grows(browser, outputs, tmp_path):
    shutil.copytree(outputs, tmp_path / "outputs")
    run = next((tmp_path / "outputs").glob("<*"))
    page, messages = browser.new_page(viewport={"width": 1000, "height": 700}), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    with serving(tmp_path / "outputs") as server:
        own = server.url
        page.on(
            "request",
            lambda sent: sent.url.startswith((own, "data:", "blob:")) or messages.append(sent.url),
        )
        page.goto(own)
        page.evaluate("plotly")
        rows = page.locator("#runs-table tbody th[scope=row]").all_inner_texts()
        assert rows == [run.name]  # the sweep is one closed row
        assert "sweep recipes" in page.locator("#runs-table .sweep").inner_text()
        page.locator("#runs-table .sweep button").click()
        assert page.locator("#runs-table tbody th[scope=row]").all_inner_texts() == [
            run.name,
            "sage × 2 seeds",
        ]
        page.goto(f"{own}run?name={quote(run.name)}")
        page.evaluate("ready.then(renderAll)")
        page.locator("#axis").select_option("rollouts")
        page.locator("#trust").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('#settings details').open = true")
        page.wait_for_timeout(100)
        seen = "document.querySelector('#trust').getBoundingClientRect().top"
        place = page.evaluate(seen)
        line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | {"iteration": 4, "grad/norm": 7.0}) + "\n")
        page.evaluate("refresh()")
        page.wait_for_function("DATA.runs[Object.keys(DATA.runs)[0]].metrics.iteration.length == 4")
        assert abs(page.evaluate(seen) - place) < 2 and page.evaluate("scrollY") > 1000
        assert page.locator("#axis").input_value() == "rollouts"
        assert page.evaluate("document.querySelector('#settings details').open")
        norm = (
            "[...document.querySelectorAll('#trust .plot')].find((p) => p.dataset.title === "
            "'Gradient norm').data[0].y"
        )
        assert page.evaluate(norm)[-1] == 7
        assert (
            page.evaluate("window.hacked") is None
            and HOSTILE in page.locator("#gallery h3").all_inner_texts()
        )
        page.goto(f"{own}health?name={quote(run.name)}")
        page.evaluate("plotly.then(renderAll)")
        assert (
            page.locator(".check .plot .trace").count() == 2
            and page.locator("#timeline .point").count() == 3
        )
        page.close()
    assert not messages


def test_a_pipe_in_place_of_a_video_is_not_opened(tmp_path):
    record_run(tmp_path / "run", gains=(0.4,), validations=(0, 2))
    video = max((tmp_path / "run/samples").rglob("*.mp4"))
    video.unlink()
    os.mkfifo(video)
    with serving(tmp_path) as server:
        status, _, content = get(server, "/")
    assert status == 200 and "run" in data_in(content)["runs"]


def test_a_run_that_can_be_read_but_not_shown_is_named(tmp_path):
    record_run(tmp_path / "run", gains=(0.4,), validations=(0, 2))
    config = tmp_path / "run/config.yaml"
    lines = config.read_text().splitlines()
    number = next(row for row, line in enumerate(lines) if "processes:" in line)
    lines[number] = f"{lines[number].partition(':')[0]}: {'9' * 400}"
    config.write_text("\n".join(lines))
    with serving(tmp_path) as server:
        status, _, content = get(server, "/")
        assert status == 200 and b"run cannot be read: OverflowError" in content
        assert get(server, "/run?name=run")[0] == 500
        record_run(tmp_path / "good")
        status, _, content = get(server, "/")
    assert status == 200 and "good" in data_in(content)["runs"]


def test_a_request_with_an_unusable_address_is_answered(outputs):
    with serving(outputs) as server:
        with socket.create_connection(server.server_address, timeout=30) as connection:
            connection.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 500
            assert b"Invalid IPv6 URL" in answer.read()
