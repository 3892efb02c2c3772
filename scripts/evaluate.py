"""Score a model, or existing videos, on a set of prompts: scores per video and a summary.

    python -m scripts.evaluate --config configs/miniature.yaml --output_dir outputs/base               the base model
    python -m scripts.evaluate --checkpoint_path outputs/miniature/checkpoints/000030 --output_dir outputs/tuned
    python -m scripts.evaluate --config run.yaml --lora_path lora --output_dir outputs/lora
    python -m scripts.evaluate --config run.yaml --videos outputs/videos --output_dir outputs/theirs      videos

Also accepts every flag of post_train.py; without --config, a checkpoint uses the settings of its
run. Prompts come from valid_video_csv and scorers from reward_model
(`--reward_model videoalign clip pickscore`). Videos are generated as in validation. The prompts of
--videos come from files in that folder (generate.py's JSON files, a run's scores.json, captions), or
else from valid_video_csv by the names of the videos. Writes scores.json and scores.csv, and for
--videos also videos.csv, which objective sft trains on. The same command again samples only the
videos that are missing.
"""

import argparse
from pathlib import Path

from hyvideo.checkpoints.format import saved_lora, saved_policy
from hyvideo.checks.rules import check_evaluation, with_local_weights
from hyvideo.data.examples import VIDEOS_FILE
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder
from hyvideo.records.progress_bar import print_stage
from hyvideo.settings import processes
from hyvideo.settings.command_line import parse
from hyvideo.settings.config import Config


@exit_on_error("evaluate.py")
def main() -> None:
    processes.prepare()
    options, settings = make_parser().parse_known_args()
    options.checkpoint_path = options.checkpoint_path and saved_policy(options.checkpoint_path)
    options.lora_path = options.lora_path and saved_lora(options.lora_path)
    world_size = processes.world_size()
    if world_size > 1:
        raise ValueError(
            f"scripts.evaluate runs in one process, got {world_size} (WORLD_SIZE): each would "
            "repeat all the work and replace the files of the others. Start it without torchrun, "
            "or share the videos of several policies among the processes with "
            "scripts.compare_policies"
        )
    config = config_of(options, settings)
    check_options(options)
    root = None if options.videos else config.model.pretrained_model_root
    check_evaluation(config.reward, root=root, output=options.out)
    if root:
        config = with_local_weights(config)

    print_stage("importing torch and the models")
    from hyvideo.generation.policy_scores import Evaluator
    from hyvideo.validation.scores_file import as_text, summarise, write_csv, write_evaluation
    from hyvideo.validation.video_folder import find_clips, write_videos_csv

    evaluator = Evaluator(config)
    try:
        evaluation, identity, store = evaluate(options, config, evaluator)
    finally:
        evaluator.close()
    write_evaluation(options.out / "scores.json", evaluation, identity)
    write_csv(options.out / "scores.csv", evaluation.videos)
    if options.videos:
        clips = find_clips(options.videos, evaluator.requests)
        scores = [entry["reward"] for entry in evaluation.videos]
        write_videos_csv(options.out / VIDEOS_FILE, clips, "score", scores)
    store.remove()
    print(f"{len(evaluation.videos)} videos; mean with 95 % Student's t interval over prompts")
    print(as_text(summarise(evaluation)))
    print(f"written to {options.out}")


def make_parser() -> Parser:
    """Return the parser of the flags that post_train.py does not have."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--checkpoint_path", type=Path, help="checkpoint of a run; default: the base model"
    )
    parser.add_argument("--lora_path", type=Path, help="file or folder of a LoRA")
    parser.add_argument(
        "--lora_scale", type=float, default=1.0, help="factor of the LoRA's weights"
    )
    parser.add_argument("--videos", type=Path, help="folder of videos to score instead of a model")
    parser.add_argument(
        "--output_dir", dest="out", type=Path, required=True, help="folder for scores.json and .csv"
    )
    return parser


def config_of(options: argparse.Namespace, settings: list[str]) -> Config:
    """Return the settings of the flags, and of a checkpoint's run if there is no ``--config``."""
    own = make_parser().flags()
    has_config = any(word.partition("=")[0] == "--config" for word in settings)
    if has_config or not options.checkpoint_path:
        return parse(settings, others=own).config

    from hyvideo.loading.run_settings import settings_of_run

    run_settings, file = settings_of_run(options.checkpoint_path)
    if file:
        print(f"using the settings of {file}")
    else:
        print("using default settings: the checkpoint has no run")
    return parse(settings, run_settings, others=own).config


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict one another."""
    if options.videos and (options.checkpoint_path or options.lora_path):
        raise ValueError(
            "--videos scores existing videos: leave out --checkpoint_path and --lora_path"
        )
    if options.videos and options.videos.resolve() == options.out.resolve():
        raise ValueError(
            "--output_dir must differ from --videos, whose files it would replace, got "
            f"{options.out}"
        )


def evaluate(options: argparse.Namespace, config: Config, evaluator):
    """Return the evaluation, its identity, and the latents that are kept until it is written."""
    from hyvideo.files.digests import digest_of
    from hyvideo.generation.generation import Source
    from hyvideo.generation.policy_scores import LatentStore
    from hyvideo.validation.contents import joint_identity, policy_identity
    from hyvideo.validation.video_folder import find_clips

    source = Source(options.checkpoint_path, options.lora_path, options.lora_scale)
    if options.videos:
        find_clips(options.videos, evaluator.requests)
    else:
        evaluator.check(source)
    # After all checks, so that a rejected command leaves no folder, and before the model is loaded.
    make_folder(options.out)
    policy = policy_identity(
        checkpoint=options.checkpoint_path, lora=options.lora_path, videos=options.videos
    )
    world = joint_identity(config, config.reward, has_model=not options.videos)
    identity = {**policy, "lora_scale": options.lora_scale, **world}
    # the same videos may be scored with other scorers
    store = LatentStore(options.out / ".latents", digest_of(identity | {"scorers": None}))
    if options.videos:
        return evaluator.folder(options.videos), identity, store
    return evaluator.policy(source, store), identity, store


if __name__ == "__main__":
    main()
