"""Serve a frozen reward model over HTTP, for runs without GPU memory for it.

    python -m scripts.reward_server --reward_model videoalign --model_path ckpts --port 8000
    post_train.py ... --remote_reward_url http://127.0.0.1:8000

By default, the server listens on this machine only. Listening on another address (--host) requires a token from
--token_file or the environment variable REWARD_SERVER_TOKEN; the run reads the token from REWARD_SERVER_TOKEN.
"""

import argparse
import os
import socket
from pathlib import Path

from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.models.reward_models.rewards import make_scorer, parse_options

LOCAL = ("127.0.0.1", "localhost", "::1")


def read_token(options: argparse.Namespace) -> str | None:
    """Return the token, None without one. Raises ValueError if a required token is missing."""
    if options.token_file:
        try:
            token = options.token_file.read_text().strip()
        except OSError as error:
            raise ValueError(f"--token_file must be a readable file, got {options.token_file}") from error
    else:
        token = os.environ.get("REWARD_SERVER_TOKEN", "").strip()
    if not token and options.host not in LOCAL:
        raise ValueError(f"listening on {options.host} needs a token: set --token_file or REWARD_SERVER_TOKEN")
    return token or None


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not yet listening. Raises OSError if the address is unavailable."""
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
    parser.add_argument("--reward_model", default="videoalign", help="scorer to serve (default: videoalign)")
    parser.add_argument("--model_path", default="ckpts", help="checkpoint folder (default: ckpts)")
    parser.add_argument("--options", default="{}", help="scorer options as a JSON object")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="device (default: auto)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 selects a free one (default: 8000)")
    parser.add_argument("--token_file", type=Path, help="file with the bearer token")
    parser.add_argument("--max_videos", type=int, default=16, help="videos scored in one batch (default: 16)")
    parser.add_argument("--max_waiting", type=int, default=64, help="active requests before a 503 reply (default: 64)")
    options = parser.parse_args()
    with exit_on_error("reward_server.py", (ValueError, OSError)):
        token = read_token(options)
        scorer_options = parse_options(options.options)
        bound_socket = bind(options.host, options.port)  # before loading weights, so that a port in use fails early

        from hyvideo.models.reward_models.service.connections import make_server
        from hyvideo.models.reward_models.service.server import create_app
        from hyvideo.training.model_setup import choose_device

        device = choose_device(options.device)
        scorer = make_scorer(options.reward_model, options.model_path, device=device, **scorer_options)
        counts = {"max_videos": options.max_videos, "max_waiting": options.max_waiting}
        app = create_app(scorer, token=token, **counts)
        bound_socket.listen(100)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"listening on http://{host}:{bound_socket.getsockname()[1]}", flush=True)
    make_server(app).run(sockets=[bound_socket])


if __name__ == "__main__":
    main()
