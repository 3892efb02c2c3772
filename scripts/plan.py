"""Predict memory and cost of a run without a GPU.

    python -m scripts.plan --config configs/hunyuanvideo15_480p_8gpu.yaml --world_size 8 --sp_size 4

Also accepts every flag of post_train.py or, with --generate, of generate.py, whose memory it then
predicts:

    python -m scripts.plan --config FILE.yaml --world_size 1 --gpu "RTX 4090"
    python -m scripts.plan --generate --resolution 480p --video_length 121 --gpu "RTX 4090"

Prints the command with the fastest settings that fit. Reads the settings and, if present, the
transformer's config.json; no weights. The exit code is 0 for any plan, even of a run that does not
fit, and 2 for a usage error.
"""

import dataclasses

import generate
from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.text import labelled, lines_of
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.generation import generation_report
from hyvideo.planning.hardware import GPUS, Hardware, hardware_of
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.report import report
from hyvideo.settings.command_line import parse
from hyvideo.settings.config import Config
from hyvideo.settings.machine_rules import prompts_are_readable
from hyvideo.settings.problems import raise_problems
from hyvideo.settings.reward_settings import reward_problems
from hyvideo.settings.run_inputs import RunInputs

# of GPUs, and of every quantity that is assumed: more GPUs take minutes to plan
MAX_NUMBER = 100_000


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        __doc__, prog="plan.py", usage="plan.py [options] [flags of post_train.py or generate.py]"
    )
    parser.add_argument("--world_size", type=int, default=8, help="number of GPUs")
    parser.add_argument(
        "--gpu", help=f"name of the GPU, which sets memory, rates and links: {', '.join(GPUS)}"
    )
    assumed = {field.name: field for field in dataclasses.fields(Hardware)}
    for name, field in assumed.items():
        parser.add_argument(
            f"--{name}", type=field.type, help=f"{field.metadata['help']} (H100: {field.default:g})"
        )
    parser.add_argument("--text_tokens", type=int, default=300, help="tokens of the longest prompt")
    parser.add_argument(
        "--generate", action="store_true", help="plan generate.py, whose flags follow"
    )
    options, settings = parser.parse_known_args(argv)
    given = {name: vars(options)[name] for name in assumed if vars(options)[name] is not None}
    for name, value in {
        "world_size": options.world_size,
        "text_tokens": options.text_tokens,
        **given,
    }.items():
        if not value > 0:
            parser.error(f"--{name} must be a positive number, got {value}")
        if value > MAX_NUMBER:
            parser.error(f"--{name} must be at most {MAX_NUMBER:,}, got {str(value):.20}")
    with exit_on_error("plan.py"):
        config = _config_of_video(settings) if options.generate else parse(settings).config
        architecture = read_architecture(
            config.model.pretrained_model_root, config.model.transformer_version
        )
        hardware = dataclasses.replace(
            hardware_of(options.gpu) if options.gpu else Hardware(), **given
        )
        run = PlannedRun(config, options.world_size, architecture, options.text_tokens, hardware)
        raise_problems(reward_problems(config.reward))
        for size in (config.sampling.size, config.validation_sampling.size):
            architecture.latent_size(*size)
        if options.generate:
            print(
                generation_report(
                    run, settings, generate.parse(settings).overlap_group_offloading is not False
                )
            )
        else:
            print(report(run, settings))
            inputs = RunInputs(config, options.world_size, files=run.files)
            absent = prompts_are_readable(inputs, existing=False)
            for line in lines_of(labelled("missing on this host", absent)):
                print(line)


def _config_of_video(words: list[str]) -> Config:
    """Return the settings of generate.py with the flags ``words``, with the video as the
    rollout.
    """
    options = generate.parse(words)
    generate.convert_reference_flags(options)
    recipe = generate.generation_settings(options, has_images=bool(options.image_path))
    sampling = recipe.sampling
    height, width = generate.size_of(options, recipe, options.image_path)
    return recipe.config.with_settings(
        height=height,
        width=width,
        sample_n_frames=sampling.frames,
        shift=sampling.shift,
        sigmas=sampling.sigmas,
        cfg_scale=sampling.guidance_scale,
        validation_num_frames=0,
        validation_height=0,
        validation_width=0,
        validation_shift=None,
        validation_cfg_scale=None,
    )


if __name__ == "__main__":
    main()
