"""The site of the pages: it is built without a warning, and works in a browser and on a phone."""

import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.chromium import start_chromium
from tests.forked import ROOT
from tests.test_docs import TEXTS

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. Dead links, dead anchors and pages outside the navigation end
    the build with an error.
    """
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def address(site):
    """The address of a server of the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.system
def test_every_page_is_in_the_site_and_its_terms_have_tooltips(site):
    for name in TEXTS.keys() - {"README.md", "docs/README.md"}:
        assert (site / name).with_suffix(".html").is_file()
    assert "Which GPU can I use" in (site / "index.html").read_text(encoding="utf-8")
    assert "Quickstart" in (site / "docs/index.html").read_text(encoding="utf-8")
    meaning = re.search(r"\*\*rollout\*\* \| (.*?) \|", TEXTS["docs/glossary.md"])[1]
    assert f'<abbr title="{meaning}">' in (site / "docs/methods.html").read_text(encoding="utf-8")


@pytest.mark.system
def test_pages_fit_a_phone_and_can_be_searched(site, address):
    pages = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    with start_chromium() as browser:
        page = browser.new_page(viewport=PHONE, is_mobile=True)
        page.route("**/workers/search*", lambda route: route.abort())  # not searched here
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for name in pages:
            page.goto(f"{address}/{name}")
            width = page.evaluate("document.documentElement.scrollWidth")
            broken = page.evaluate(
                "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
            )
            assert (width, broken) == (PHONE["width"], []), name
        assert not [url for url in asked if not url.startswith(address)]  # of other servers
        page = browser.new_page()
        page.goto(f"{address}/index.html")
        page.locator(".md-search__input").fill("vbench")
        first = page.locator(".md-search-result__link").first
        first.wait_for()
        assert "appendix.html" in first.get_attribute("href")
