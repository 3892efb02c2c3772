"""Rules that depend on the machine: packages, files and folders, one function per rule, as in
`rules`.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from hyvideo.checkpoints.format import complete, is_complete
from hyvideo.data.examples import check_videos
from hyvideo.data.prompts import Request, check_images
from hyvideo.data.video_files import ClipForm
from hyvideo.files.files import (
    file_problem,
    find_path,
    folder_problem,
    is_repository,
    write_problem,
)
from hyvideo.files.run_folder import STOPPED_FOR_HACKING
from hyvideo.files.text import quote
from hyvideo.models.versions import RELEASED
from hyvideo.settings import processes
from hyvideo.settings.config import RESUME_WORDS
from hyvideo.settings.problems import Problems, problem_of
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sections import ModelSettings, ValidationSettings

REPORTS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")


def data_problems(inputs: RunInputs) -> Problems:
    """Yield what the prompts, pairs and sizes of the run lack, as far as their files exist."""
    config = inputs.config
    source = config.objective.videos_from
    if source and not getattr(config.objective, source):
        yield f"objective {config.objective.name} needs {source}, the videos to train on, got none"
    if not source and not config.data.prompts_csv:
        yield "prompts_csv must name a file or folder of prompts, got none"
    yield from prompts_are_readable(inputs, existing=True)
    yield from pairs_are_usable(inputs, existing=True)
    yield from sizes_fit_the_model(inputs)


def machine_problems(inputs: RunInputs) -> Problems:
    """Yield a message for each package, file or folder of the run that this machine lacks."""
    config = inputs.config
    model = config.model
    record = config.record
    yield from packages_are_installed(record.report_to, model)
    yield from prompts_are_readable(inputs, existing=False)
    yield from pairs_are_usable(inputs, existing=False)
    yield from checkpoints_exist(model.pretrained_model_root)
    if model.transformer_version not in RELEASED:
        yield from problem_of(lambda: inputs.architecture)
    weights = {
        "anchor_path": config.objective.anchor_path,
        "pretrained_lora_path": config.optimizer.pretrained_lora_path,
        "base_lora_path": model.base_lora_path,
        "low_noise_base_lora_path": model.low_noise_base_lora_path,
    }
    yield from weights_exist(weights)
    yield from folders_can_be_written("output_dir", record.output_dir)
    yield from resumed_checkpoint_exists(record.resume_from_checkpoint)
    yield from run_was_not_stopped(config.validation, record.output_dir)
    if model.conditions_dir:
        yield from folders_can_be_written("conditions_dir", model.conditions_dir)


def resumed_checkpoint_exists(resume_from: str) -> Problems:
    """Yield that ``resume_from_checkpoint`` names neither a complete checkpoint nor a run with one."""
    if resume_from in RESUME_WORDS:
        return
    folder = Path(resume_from)
    if not resume_from or not (is_complete(folder) or complete(folder)):
        yield (
            "resume_from_checkpoint must be auto or a complete checkpoint of a run, got "
            f"{quote(resume_from)}"
        )


def run_was_not_stopped(validation: ValidationSettings, output_dir: str) -> Problems:
    """Yield that the run in ``output_dir`` was stopped for reward hacking."""
    marker = Path(output_dir) / STOPPED_FOR_HACKING
    if validation.on_reward_hacking != "warn" and marker.is_file():
        yield (
            f"the run in output_dir {quote(output_dir)} was stopped for reward hacking "
            "and would stop again; docs/judge_a_run.md#reward-hacking describes what to change; "
            f"to resume, delete {marker} or set on_reward_hacking warn"
        )


def packages_are_installed(report_to: list[str], model: ModelSettings) -> Problems:
    for name in REPORTS:
        if name in report_to and not is_installed(name):
            yield (
                f"report_to needs {name}, which is not installed; run `pip install {name}`, or "
                f"remove {name} from report_to"
            )
    yield from fp8_is_installed(model)


def fp8_is_installed(model: ModelSettings) -> Problems:
    for setting in ("base_weight_dtype", "partner_weight_dtype"):
        if getattr(model, setting) == "fp8" and not is_installed("torchao"):
            yield (
                f"{setting} fp8 needs torchao, which is not installed; run `pip install "
                f"torchao==0.18.0` or set {setting} bf16"
            )


def is_installed(package: str) -> bool:
    """Return whether a package is installed; a folder with its name, such as ./wandb of a run, does
    not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def prompts_are_readable(inputs: RunInputs, *, existing: bool) -> Problems:
    """Yield a message for each unreadable prompts file.

    Checks only files that exist, or only those that do not.
    """
    data = inputs.config.data
    trained = [] if inputs.config.objective.videos_from else data.prompts_csv
    for path in dict.fromkeys([*trained, *data.valid_video_csv]):
        if os.path.exists(find_path(path)) == existing:
            yield from problem_of(lambda path: check_images(inputs.files.read([path])), path)


def pairs_are_usable(inputs: RunInputs, *, existing: bool) -> Problems:
    """Yield a message if the rated pairs of a run cannot be used.

    Checks only if all files exist, or only if not.
    """
    config = inputs.config
    paths = getattr(config.objective, config.objective.videos_from or "missing", None)
    if not paths:
        return
    if all(os.path.exists(find_path(path)) for path in paths) != existing:
        return
    yield from problem_of(check_pairs, inputs)


def check_pairs(inputs: RunInputs) -> None:
    """Raise ValueError for pairs without a preference, and for videos that do not fit the run."""
    check_images(inputs.videos.all_requests)
    data = inputs.config.data
    check_videos(inputs.videos.all, ClipForm(*inputs.config.sampling.size, data.fps, data.fit))


def sizes_fit_the_model(inputs: RunInputs) -> Problems:
    """Yield frames that the VAE, and sizes that the transformer does not support.

    Nothing is checked if the transformer is neither released nor present.
    """
    config = inputs.config
    try:
        architecture = inputs.architecture
    except ValueError as error:
        if config.model.transformer_version in RELEASED:
            yield str(error)
        return
    frames = {"sample_n_frames": config.data.sample_n_frames}
    if config.validation.validation_num_frames:
        frames["validation_num_frames"] = config.validation.validation_num_frames
    for name, number in frames.items():
        yield from problem_of(architecture.check_frames, number, name)
    for whose, (_, height, width) in config.video_sizes.items():
        for problem in problem_of(architecture.latent_size, 1, height, width):
            yield f"{problem} for {whose}"


def image_problems(
    task: str | None,
    given_frames: tuple[int, int] | None,
    requests: list[Request],
    version: str,
    source: str,
) -> Problems:
    """Yield images given to a version that reads none, or only the first, and images that it needs.

    ``given_frames`` are the fewest and the most images of a row (`Family.given_frames`). If they are
    None, an image-to-video version needs an image in any row.
    """
    with_image = [request for request in requests if request.image is not None]
    with_last = [request for request in requests if request.last_image is not None]
    fewest, most = given_frames or (0, 1)
    if task == "t2v" and with_image:
        yield (
            f"{version} is for text-to-video, got {len(with_image)} reference images in {source}, "
            f"the first for {with_image[0].described}; use an i2v version or remove the images"
        )
    elif with_last and most < 2:
        yield (
            f"{version} makes videos from a first frame, got a last frame for {len(with_last)} "
            f"prompts of {source}, the first for {with_last[0].described}; use "
            "wan2.1_flf2v_14b_720p or wan2.2_i2v_a14b, or remove the last frames"
        )
    if task == "i2v" and requests and not with_image:
        yield (
            f"{version} is for image-to-video, got no reference image for the {len(requests)} "
            f"prompts of {source}; add a column ref_image_path to the CSV, pass --image_path to "
            "generate.py, or use a t2v version"
        )
        return
    lacking = [request for request in requests if len(request.images) < fewest]
    if lacking:
        columns, flags = "ref_image_path", "--image_path"
        if fewest == 2:
            columns += " and ref_last_image_path"
            flags += " and --last_image_path"
        yield (
            f"{version} needs {columns} in every row, got {len(lacking)} of {len(requests)} prompts "
            f"of {source} without, the first is {lacking[0].described}; add them, or pass {flags} "
            "to generate.py"
        )


def check_gpu(device: str) -> None:
    """Raise ValueError if the run asks for a GPU on a machine that has none."""
    if device == "cuda" and not processes.may_have_gpu():
        raise ValueError(
            "device cuda needs a GPU that torch can use, and none was found; set device auto or cpu"
        )


def checkpoints_exist(root: str) -> Problems:
    problem = folder_problem(root)
    if problem and not is_repository(root):
        yield (
            "pretrained_model_root must be a checkpoint folder, or a repository on the Hugging Face "
            f"Hub in diffusers' layout (OWNER/NAME), got {quote(root)}: {problem}; download the "
            "weights (checkpoints-download.md), or use configs/miniature.yaml, which needs no "
            "download"
        )


def weights_exist(paths: Mapping[str, str]) -> Problems:
    """Yield settings that name weights which do not exist."""
    for name, path in paths.items():
        if path and folder_problem(path) and file_problem(path):
            yield (
                f"{name} must be a checkpoint of a run, or a LoRA file or folder, got "
                f"{quote(path)}: {file_problem(path)}; correct the path"
            )


def folders_can_be_written(name: str, folder: str | Path) -> Problems:
    problem = write_problem(folder)
    if problem:
        yield (
            f"{name} must be a writable folder, got {quote(folder)}: {problem}; choose another "
            "folder"
        )
