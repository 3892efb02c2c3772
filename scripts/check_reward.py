"""Check whether a reward is usable for training, on one video that is scored about twenty times.

    python -m scripts.check_reward --reward_model videoalign
    python -m scripts.check_reward --reward_model miniature --reward_path assets/miniature
    python -m scripts.check_reward --reward_model clip --video clip.mp4 --prompt "a cat jumps"
    python -m scripts.check_reward --reward_model my_rewards.py:Brightness
    python -m scripts.check_reward --reward_model clip --reward_config '{"clip": {"path": "ckpts/my_clip"}}'

Exit code: 0 if no check failed (warnings are allowed), 1 if a check failed, 2 for invalid arguments
or unusable files.
"""

import argparse
import sys
from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--reward_model", required=True, help="scorer, as in post_train.py: NAME or FILE.py:CLASS"
    )
    parser.add_argument("--pretrained_model_root", default="ckpts", help="checkpoint folder")
    parser.add_argument(
        "--reward_path", help="folder of the scorer's files (clip and pickscore: or hub name)"
    )
    parser.add_argument(
        "--reward_config",
        default="",
        help="options by scorer, as in post_train.py: YAML file or JSON",
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--video", type=Path, help="mp4 file to score instead of a rendered video")
    parser.add_argument("--prompt", help="prompt of --video")
    parser.add_argument(
        "--dimensions", nargs="+", help="dimensions that must be scored (default: the scorer's)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run only the checks that precede every training run"
    )
    args = parser.parse_args()
    if (args.video is None) != (args.prompt is None):
        parser.error("--video needs --prompt and vice versa; omit both to use a rendered video")

    import torch  # not needed for --help, which it would slow down

    from hyvideo.config.command_line import options_of_scorer
    from hyvideo.rewards.rewards import make_scorer
    from hyvideo.rewards.scorer_check import check_scorer, has_failed, lines

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with exit_on_error("check_reward.py", (ValueError, FileNotFoundError)):
        options = options_of_scorer(args.reward_model, args.reward_config)
        if args.reward_path:
            options.setdefault("path", args.reward_path)
        trial = make_trial(args)
        scorer = make_scorer(
            args.reward_model, args.pretrained_model_root, device=device, **options
        )
        checks = check_scorer(scorer, trial, dimensions=args.dimensions, quick=args.quick)
    print("\n".join(lines(checks)))
    return 1 if has_failed(checks) else 0


def make_trial(args: argparse.Namespace):
    """Return the trial video that the arguments select."""
    from hyvideo.data.videos import read_video
    from hyvideo.miniature.reward import miniature_trial
    from hyvideo.rewards.trial_clips import Trial, synthetic_trial

    if args.video is not None:
        video, fps = read_video(args.video)
        return Trial(video, args.prompt, fps)
    is_miniature = args.reward_model in ("miniature", "miniature_videoalign")
    return miniature_trial() if is_miniature else synthetic_trial()


if __name__ == "__main__":
    sys.exit(main())
