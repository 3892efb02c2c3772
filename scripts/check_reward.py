"""Checks whether a reward can be trained with: ``python -m scripts.check_reward --reward_model videoalign``.

    python -m scripts.check_reward --reward_model miniature --model_path assets/miniature
    python -m scripts.check_reward --reward_model clip --video clip.mp4 --prompt "a cat jumps"
    python -m scripts.check_reward --reward_model my_rewards.py:Brightness

Tries the scorer on one clip, which takes some twenty scores. Ends with 0, with 1 when a check failed, and with 2 when
it was called wrongly or the scorer's files cannot be used. Warnings do not count as failures.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from hyvideo.data.outside import refusals


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--reward_model", required=True, help="a scorer, as in post_train.py: a name or FILE.py:CLASS")
    parser.add_argument("--pretrained_model_root", default="ckpts", help="the checkpoint folder; ckpts")
    parser.add_argument("--model_path", help="the scorer's own folder (CLIP and PickScore: or hub name)")
    parser.add_argument("--options", default="{}", help="""of the scorer, as JSON: '{"precision": "fp32_math"}'""")
    parser.add_argument("--device", help="cuda or cpu; cuda where there is one")
    parser.add_argument(
        "--clip", choices=("miniature", "synthetic"), help="rendered; miniature for scorers of its world"
    )
    parser.add_argument("--video", type=Path, help="an mp4 to try it on, in place of a rendered clip")
    parser.add_argument("--prompt", help="of the video")
    parser.add_argument("--foreign_prompt", help="that does not fit the video")
    parser.add_argument("--dimensions", nargs="+", help="that must be there; those that the scorer promises")
    parser.add_argument("--tolerance", type=float, help="of scores that differ by rounding, in their units")
    parser.add_argument("--quick", action="store_true", help="only what a training run tries at its start")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if (args.video is None) != (args.prompt is None):
        parser.error("--video and --prompt belong together; give both, or neither for a rendered clip")
    if args.video is not None and args.clip is not None:
        parser.error("--video and --clip are two clips; give one of them")

    import torch  # after --help, which it would slow down

    from hyvideo.models.reward_models.rewards import make_scorer, parse_options
    from hyvideo.models.reward_models.scorer_check import TOLERANCE, check_scorer, has_failed, lines

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    with refusals("check_reward.py", (ValueError, FileNotFoundError)):
        options = ({"path": args.model_path} if args.model_path else {}) | parse_options(args.options)
        trial = trial_of(args)
        scorer = make_scorer(args.reward_model, args.pretrained_model_root, device=device, **options)
        checks = check_scorer(scorer, trial, dimensions=args.dimensions, tolerance=tolerance, quick=args.quick)
    print("\n".join(lines(checks)))
    return 1 if has_failed(checks) else 0


def trial_of(args: argparse.Namespace):
    """The clip that the arguments ask for."""
    from hyvideo.data.videos import read_video
    from hyvideo.miniature.reward import miniature_trial
    from hyvideo.models.reward_models.trial_clips import synthetic_trial

    is_miniature = (args.clip or args.reward_model) in ("miniature", "miniature_videoalign")
    trial = miniature_trial() if is_miniature else synthetic_trial()
    if args.foreign_prompt is not None:
        trial = dataclasses.replace(trial, foreign_prompt=args.foreign_prompt)
    if args.video is not None:
        video, fps = read_video(args.video)
        trial = dataclasses.replace(trial, video=video, prompt=args.prompt, fps=fps)
    return trial


if __name__ == "__main__":
    sys.exit(main())
