"""Serves a frozen reward model over HTTP, for runs whose GPUs have no room for it.

    python -m scripts.reward_server --reward_model videoalign --model_path ckpts --port 8000
    post_train.py ... --remote_reward_url http://127.0.0.1:8000

Listens on this machine only, unless --host names another address; then a token is needed, in a file
(--token_file) or in the environment variable REWARD_SERVER_TOKEN, and the run has it in REWARD_SERVER_TOKEN too.
"""

import argparse
import os
import socket
from pathlib import Path

from hyvideo.data.outside import Parser, refusals
from hyvideo.models.reward_models.rewards import make_scorer, parse_options

LOCAL = ("127.0.0.1", "localhost", "::1")


def token_of(options: argparse.Namespace) -> str | None:
    """The token, where there is one. Raises ValueError where one is needed and missing."""
    if options.token_file:
        try:
            token = options.token_file.read_text().strip()
        except OSError as error:
            raise ValueError(f"--token_file must be a readable file, got {options.token_file}") from error
    else:
        token = os.environ.get("REWARD_SERVER_TOKEN", "").strip()
    if not token and options.host not in LOCAL:
        raise ValueError(f"listening on {options.host} needs a token: --token_file or REWARD_SERVER_TOKEN")
    return token or None


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address, which does not listen yet. Raises OSError where the address cannot be had."""
    bound_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound_socket.bind((host, port))
    except (OSError, OverflowError) as error:
        bound_socket.close()
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    return bound_socket


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--reward_model", default="videoalign")
    parser.add_argument("--model_path", default="ckpts", help="folder of the checkpoints")
    parser.add_argument("--options", default="{}", help="JSON object of the scorer's options")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--token_file", type=Path)
    parser.add_argument("--max_videos", type=int, default=16, help="videos that are scored together")
    parser.add_argument("--max_waiting", type=int, default=64, help="requests that may wait; more are sent away")
    options = parser.parse_args()
    with refusals("reward_server.py", (ValueError, OSError)):
        token = token_of(options)
        scorer_options = parse_options(options.options)
        bound_socket = bound(options.host, options.port)  # a port that is taken is refused before gigabytes are read

        from hyvideo.models.reward_models.service.connections import make_server
        from hyvideo.models.reward_models.service.server import create_app
        from hyvideo.training.model_setup import choose_device

        device = choose_device(options.device)
        scorer = make_scorer(options.reward_model, options.model_path, device=device, **scorer_options)
        counts = {"max_videos": options.max_videos, "max_waiting": options.max_waiting}
        app = create_app(scorer, name=options.reward_model, token=token, **counts)
        bound_socket.listen(100)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{bound_socket.getsockname()[1]}", flush=True)
    make_server(app).run(sockets=[bound_socket])


if __name__ == "__main__":
    main()
