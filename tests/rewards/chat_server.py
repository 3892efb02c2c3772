"""A local endpoint for chat completions, for the tests of its clients."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest

from hyvideo.rewards.chat_endpoint import ChatEndpoint


def completion(content, *, end="stop", tokens=None, **message):
    logprobs = tokens and {"content": tokens}
    choice = {"finish_reason": end, "message": {"role": "assistant", "content": content} | message}
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 9,
        "total_tokens": 109,
        "details": {"cached_tokens": 0},
    }
    return {"choices": [choice | {"logprobs": logprobs}], "usage": usage}


class Endpoint:
    """A server in a thread that sends what ``answer(request, call)`` returns: JSON, bytes, or
    (status, headers, JSON).

    None closes the connection.
    """

    def __init__(self, answer):
        self.requests, self.headers, self.most_at_once = [], [], 0
        at_once, lock, owner = [0], threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                with lock:
                    owner.requests.append(
                        json.loads(self.rfile.read(int(self.headers["content-length"])))
                    )
                    owner.headers.append(dict(self.headers) | {"path": self.path})
                    number, at_once[0] = len(owner.requests) - 1, at_once[0] + 1
                    owner.most_at_once = max(owner.most_at_once, at_once[0])
                result = answer(owner.requests[number], number) if callable(answer) else answer
                with lock:
                    at_once[0] -= 1
                if result is None:
                    self.connection.close()
                    return
                status, headers, content = (
                    result if isinstance(result, tuple) else (200, {}, result)
                )
                if not callable(content):
                    content = (
                        content if isinstance(content, bytes) else json.dumps(content).encode()
                    )
                    headers = {"content-length": str(len(content))} | headers
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    content(self.wfile) if callable(content) else self.wfile.write(content)
                except OSError:
                    pass  # the client disconnected

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@contextmanager
def endpoints():
    """Context manager that yields a function that starts an `Endpoint`; retries do not wait."""
    started = []

    def start(answer):
        started.append(Endpoint(answer))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPENAI_API_KEY", raising=False)
        patch.setattr(ChatEndpoint, "backoff", 0.005)
        yield start
    for server in started:
        server.server.shutdown()
        server.server.server_close()
