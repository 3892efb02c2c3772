"""Server of the runs in a folder: the pages of `page`, built again when the files of a run change.

It writes nothing.

    /                all runs
    /run?name=NAME   the report of a run
    /health?name=    is it healthy?
    /plotly.js, /clip?id=, /poster?id=, /file?id=

Only files that a page shows can be read, by the digest of their content. On an address that other
machines can reach, every request needs a token.
"""

import gzip
import hmac
import ipaddress
import os
import secrets
import sys
import threading
import time
from base64 import b64decode
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from jinja2 import TemplateError

from hyvideo.data.files import folder_problem
from hyvideo.data.run_folder import CHECKPOINTS, METRICS, SAMPLES
from hyvideo.data.templates import fill
from hyvideo.data.text import describe_error, quote
from hyvideo.records.stage_timer import TIMELINE_FILE
from hyvideo.report import clips
from hyvideo.report.comparison import Comparison
from hyvideo.report.contents import MAX_POINTS, NOTES_FILES, Run, read_run
from hyvideo.report.gallery import short_names
from hyvideo.report.health import GpuHistory, find_checks, read_status, stall_text, status_text
from hyvideo.report.page import as_script, packed_plotly, page_data, points_each, served_page

# Raised for corrupted records, by reading or by rendering them.
CORRUPTED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    TemplateError,
)
MAX_DEPTH = 5  # of a run below the served folder
WATCHED = (
    METRICS,
    "config.yaml",
    TIMELINE_FILE,
    SAMPLES,
    CHECKPOINTS,
    f"{CHECKPOINTS}/latest",
    *NOTES_FILES,
)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN_VARIABLE = "REPORT_TOKEN"
MAX_CACHED_PAGES = 32
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def find_runs(folder: Path) -> list[Path]:
    """Return the output folders of runs in a folder, or the folder itself if it is one."""
    found = []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        if "config.yaml" in files:
            found.append(Path(place))
            folders.clear()
        folders[:] = (
            sorted(name for name in folders if not name.startswith("."))
            if depth < MAX_DEPTH
            else []
        )
    return found


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Library:
    """Runs of a folder and their pages, which are kept until a file of a run changes."""

    def __init__(self, folder: Path):
        if problem := folder_problem(folder):
            raise ValueError(f"--serve needs a folder with runs, got {quote(folder)}: {problem}")
        self.folder = folder.resolve()
        self.gpus = GpuHistory()
        self.files: dict[str, Path] = {}  # videos of the pages, by digest
        self._lock = threading.Lock()
        # stamp, and the run or its problem
        self._runs: dict[tuple[Path, int], tuple[tuple, Run | str]] = {}
        self._pages: dict[tuple, tuple[str, bytes]] = {}  # stamp and content, by kind and name

    def page(self, kind: str, name: str) -> tuple[str, bytes]:
        """Return the stamp and the text of a page. Raises LookupError for an unknown run.

        Args:
            kind: "all", "run" or "health".
            name: Of a run; empty for all.
        """
        with self._lock:
            folders = find_runs(self.folder)
            names = dict(zip(short_names(folders), folders))
            chosen = names if kind == "all" else {name: names[name]}
            points = points_each(len(chosen)) if kind == "all" else MAX_POINTS
            runs = {each: self._read(place, points) for each, place in chosen.items()}
            stamp = self._stamp_of(kind, points, chosen, names)
            kept = self._pages.get((kind, name))
            if kept and kept[0] == stamp:
                return kept
            content = self._render(kind, runs, list(names), stamp).encode()
            while len(self._pages) >= MAX_CACHED_PAGES:
                del self._pages[next(iter(self._pages))]
            self._pages[kind, name] = (stamp, content)
            return stamp, content

    def _stamp_of(
        self, kind: str, points: int, chosen: dict[str, Path], names: dict[str, Path]
    ) -> str:
        """Return a text that changes whenever the page does."""
        parts: list[object] = [kind, sorted(names)]
        for place in chosen.values():
            stamp, run = self._runs[place, points]
            parts += [stamp, read_status(run).state if isinstance(run, Run) else run]
        if kind == "health":
            parts.append(int(time.time() // self.gpus.every_s))
        return clips.digest_of(repr(parts).encode())

    def _read(self, folder: Path, points: int) -> Run | str:
        """Return a run, or why it cannot be read; it is kept until its files change."""
        stamp = tuple(_modified(folder / name) for name in WATCHED) + (_newest_measures(folder),)
        kept = self._runs.get((folder, points))
        if kept and kept[0] == stamp:
            return kept[1]
        try:
            run = read_run(folder, points)
        except CORRUPTED as error:
            run = describe_error(error)
        self._runs[folder, points] = (stamp, run)
        return run

    def _render(self, kind: str, runs: dict[str, Run | str], names: list[str], stamp: str) -> str:
        """Return a page. A run that cannot be shown is named on the page of all runs."""
        try:
            page, shown = self._page_of(kind, runs, names, stamp)
        except CORRUPTED as error:
            problems = {name: self._problem_of(name, run, stamp) for name, run in runs.items()}
            problems = {name: problem for name, problem in problems.items() if problem}
            if kind == "all" and problems:
                return self._render(kind, runs | problems, names, stamp)
            raise ValueError(
                f"the records of {', '.join(runs)} are corrupted: {describe_error(error)}"
            ) from error
        self.files |= {digest: file for file, digest in shown.digests.items()}
        return page

    def _problem_of(self, name: str, run: Run | str, stamp: str) -> str:
        """Return why a page of a run that could be read cannot be rendered; empty if it can."""
        if isinstance(run, str):
            return ""
        try:
            self._page_of("run", {name: run}, [name], stamp)
        except CORRUPTED as error:
            return describe_error(error)
        return ""

    def _page_of(
        self, kind: str, runs: dict[str, Run | str], names: list[str], stamp: str
    ) -> tuple[str, clips.Clips]:
        """Return a page and its videos. Raises one of `CORRUPTED` if a run cannot be shown."""
        readable = {name: run for name, run in runs.items() if isinstance(run, Run)}
        problems = {name: run for name, run in runs.items() if isinstance(run, str)}
        if kind == "health" and readable:
            return self._health_page(readable, names, stamp), clips.Clips()
        found = Comparison(readable, {}, {}, {}, {})
        statuses = {name: status_text(run, read_status(run)) for name, run in readable.items()}
        return served_page(found, stamp=stamp, statuses=statuses, problems=problems)

    def _health_page(self, runs: dict[str, Run], names: list[str], stamp: str) -> str:
        ((name, run),) = runs.items()
        status = read_status(run)
        warnings = [text for text in (stall_text(run, status), run.hacking, *run.problems) if text]
        checks = find_checks(run)
        data = {
            "runs": {name: page_data(run, MAX_POINTS)},
            "checks": [{"title": check.title, "metric": check.metric} for check in checks],
            "gpus": self.gpus.as_json(),
            "served": True,
            "stamp": stamp,
        }
        return fill(
            Path(__file__).with_name("health.html.j2"),
            name=name,
            names=names,
            run=run,
            state=status.state,
            status=status_text(run, status),
            warnings=warnings,
            checks=checks,
            data=data,
            script=as_script(data),
        )


def _modified(path: Path) -> int:
    """Return the time of the last change of a file, 0 without one."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _newest_measures(folder: Path) -> int:
    """Return the time of the newest validation's results, which are written after its folder."""
    try:
        newest = max((folder / SAMPLES).iterdir(), default=None)
    except OSError:
        return 0
    return _modified(newest / "measures.json") if newest else 0


# --- HTTP -----------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Serves a library on one address. ``token`` is empty if none is needed."""

    daemon_threads = True

    def __init__(self, library: Library, host: str, port: int):
        self.library = library
        self.token = (
            "" if is_local(host) else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(16)
        )
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        self._ended = threading.Event()
        super().__init__((host, port), Handler)  # closes itself if the port is taken
        threading.Thread(target=self._sample, name="gpus", daemon=True).start()

    @property
    def url(self) -> str:
        """URL of the first page, with the token if there is one."""
        host, port = self.server_address[:2]
        name = f"[{host}]" if ":" in str(host) else host
        query = f"?{urlencode({'token': self.token})}" if self.token else ""
        return f"http://{name}:{port}/{query}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print an error, unless the browser has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()

    def _sample(self) -> None:
        gpus = self.library.gpus
        gpus.sample()
        while not self._ended.wait(gpus.every_s):
            gpus.sample()


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "report"
    sys_version = ""
    timeout = 60

    def log_message(self, *arguments: object) -> None:
        """Print nothing: a page is requested every few seconds."""

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            if self._is_allowed(parts.path, query):
                self._answer(parts.path, query)
        except LookupError:
            self._send(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError):  # the browser left
                self.close_connection = True
                return
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                describe_error(error).encode(),
                "text/plain; charset=utf-8",
            )

    do_HEAD = do_GET

    def _is_allowed(self, path: str, query: dict[str, str]) -> bool:
        """Return whether the request may be answered; otherwise, send why not.

        Without a token, the name in the request must be this machine's name: a page of another
        site could otherwise reach the server under a name of its choice, which it has pointed to
        this address.
        """
        token = self.server.token
        if not token:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if name in (*LOCAL_NAMES, str(self.server.server_address[0])):
                return True
            self._send(
                HTTPStatus.FORBIDDEN, b"use localhost as the name of this server", "text/plain"
            )
            return False
        if hmac.compare_digest(query.get("token", "").encode(), token.encode()):
            del query["token"]
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", f"{path}?{urlencode(query)}" if query else path)
            self.send_header(
                "Set-Cookie", f"{self._cookie_name()}={token}; HttpOnly; SameSite=Strict; Path=/"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        if hmac.compare_digest(self._cookie().encode(), token.encode()):
            return True
        self._send(
            HTTPStatus.UNAUTHORIZED,
            b"open the URL with the token that the server has printed",
            "text/plain",
        )
        return False

    def _cookie_name(self) -> str:
        # cookies of a host are shared by all its ports
        return f"report_{self.server.server_address[1]}"

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name())
        except CookieError:
            return ""
        return found.value if found else ""

    def _answer(self, path: str, query: dict[str, str]) -> None:
        library = self.server.library
        if path == "/plotly.js":
            self._send_packed(b64decode(packed_plotly()), "text/javascript; charset=utf-8")
        elif path in ("/clip", "/poster", "/file"):
            self._send_video(path, query["id"], library.files[query["id"]])
        elif path in ("/", "/run", "/health"):
            kind = path[1:] or "all"
            stamp, content = library.page(kind, query["name"] if kind != "all" else "")
            self._send_page(stamp, content)
        else:
            raise LookupError(path)

    def _send_page(self, stamp: str, content: bytes) -> None:
        if self.headers.get("If-None-Match") == f'"{stamp}"':
            self._send(HTTPStatus.NOT_MODIFIED, b"", "text/html")
            return
        headers = {"ETag": f'"{stamp}"'}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            content = gzip.compress(content, compresslevel=3)
        self._send(HTTPStatus.OK, content, "text/html; charset=utf-8", headers)

    def _send_packed(self, packed: bytes, kind: str) -> None:
        headers = {"Content-Encoding": "gzip", "Cache-Control": "private, max-age=86400"}
        self._send(HTTPStatus.OK, packed, kind, headers)

    def _send_video(self, path: str, digest: str, file: Path) -> None:
        keep = {"Cache-Control": "private, max-age=86400"}
        if path == "/poster":
            self._send(HTTPStatus.OK, clips.poster(file, digest), "image/webp", keep)
        elif path == "/clip":
            self._send_ranges(clips.clip(file, digest), keep)
        else:
            self._send_ranges(file.read_bytes(), keep)

    def _send_ranges(self, content: bytes, headers: dict[str, str]) -> None:
        """Send a video, or the part of it that the browser requests."""
        headers = headers | {"Accept-Ranges": "bytes"}
        unit, _, span = self.headers.get("Range", "").partition("=")
        first, _, last = span.partition("-")
        if unit != "bytes" or not first.isdecimal() or (last and not last.isdecimal()):
            self._send(HTTPStatus.OK, content, "video/mp4", headers)
            return
        start = int(first)
        end = min(int(last), len(content) - 1) if last else len(content) - 1
        if start > end:
            headers["Content-Range"] = f"bytes */{len(content)}"
            self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", "video/mp4", headers)
            return
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(HTTPStatus.PARTIAL_CONTENT, content[start : end + 1], "video/mp4", headers)

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        all_headers = (
            HEADERS | {"Content-Type": kind, "Content-Length": str(len(content))} | (headers or {})
        )
        for name, value in all_headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
