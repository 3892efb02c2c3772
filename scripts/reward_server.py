"""Serve a frozen reward model over HTTP, for runs without GPU memory for it.

    python -m scripts.reward_server --reward_model videoalign --pretrained_model_root ckpts --port 8000
    post_train.py ... --reward_model '{"name": "remote", "options": {"url": "http://127.0.0.1:8000"}}'

By default, the server listens on this machine only. Listening on another address (--host) requires
a token in the environment variable REWARD_SERVER_TOKEN, of the server and of the run.
"""

import os

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.rewards.identity import scorer_identity
from hyvideo.rewards.rewards import make_scorer
from hyvideo.settings.reward_settings import options_of_scorer


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--reward_model", default="videoalign", help="scorer to serve")
    parser.add_argument("--pretrained_model_root", default="ckpts", help="checkpoint folder")
    parser.add_argument(
        "--reward_config",
        default="",
        help="options by scorer, as in post_train.py: YAML file or JSON",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="device; auto uses a GPU if there is one",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 selects a free one")
    options = parser.parse_args()
    with exit_on_error("reward_server.py", (ValueError, OSError, OverflowError)):
        from hyvideo.files.http_guard import LOCAL, listen, make_server
        from hyvideo.weights.hub import local_folder

        token = os.environ.get("REWARD_SERVER_TOKEN", "").strip() or None
        if not token and options.host not in LOCAL:
            raise ValueError(f"listening on {options.host} needs a token: set REWARD_SERVER_TOKEN")
        scorer_options = options_of_scorer(options.reward_model, options.reward_config)

        from hyvideo.loading.model_setup import choose_device
        from hyvideo.rewards.service.server import create_app

        # before loading weights, so that a port in use fails early
        listener, url = listen(options.host, options.port)
        device = choose_device(options.device)
        root = local_folder(options.pretrained_model_root)
        identity = scorer_identity(options.reward_model, root, scorer_options)
        scorer = make_scorer(options.reward_model, root, device=device, **scorer_options)
        app = create_app(scorer, token=token, identity=identity)
    print(f"listening on {url}", flush=True)
    make_server(app).run(sockets=[listener])


if __name__ == "__main__":
    main()
