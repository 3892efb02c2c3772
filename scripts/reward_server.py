"""Serve a frozen reward model over HTTP, for runs without GPU memory for it.

    python -m scripts.reward_server --reward_model videoalign --model_path ckpts --port 8000
    post_train.py ... --remote_reward_url http://127.0.0.1:8000

By default, the server listens on this machine only. Listening on another address (--host) requires a token in the
environment variable REWARD_SERVER_TOKEN, of the server and of the run.
"""

import os

from hyvideo.data.outside import Parser, exit_on_error
from hyvideo.models.reward_models.rewards import make_scorer, parse_options

LOCAL = ("127.0.0.1", "localhost", "::1")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--reward_model", default="videoalign", help="scorer to serve (default: videoalign)")
    parser.add_argument("--model_path", default="ckpts", help="checkpoint folder (default: ckpts)")
    parser.add_argument("--options", default="{}", help="scorer options as a JSON object")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="device (default: auto)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 selects a free one (default: 8000)")
    parser.add_argument("--max_videos", type=int, default=16, help="videos scored in one batch (default: 16)")
    parser.add_argument("--max_waiting", type=int, default=64, help="active requests before a 503 reply (default: 64)")
    options = parser.parse_args()
    with exit_on_error("reward_server.py", (ValueError, OSError, OverflowError)):
        token = os.environ.get("REWARD_SERVER_TOKEN", "").strip() or None
        if not token and options.host not in LOCAL:
            raise ValueError(f"listening on {options.host} needs a token: set REWARD_SERVER_TOKEN")
        scorer_options = parse_options(options.options)

        from hyvideo.models.reward_models.service.connections import listen, make_server
        from hyvideo.models.reward_models.service.server import create_app
        from hyvideo.training.model_setup import choose_device

        listener, url = listen(options.host, options.port)  # before loading weights, so that a port in use fails early
        device = choose_device(options.device)
        scorer = make_scorer(options.reward_model, options.model_path, device=device, **scorer_options)
        app = create_app(scorer, token=token, max_videos=options.max_videos, max_waiting=options.max_waiting)
    print(f"listening on {url}", flush=True)
    make_server(app).run(sockets=[listener])


if __name__ == "__main__":
    main()
