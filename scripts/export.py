"""Export a trained model as a diffusers model, in the original layout, or as LoRA files.

    python -m scripts.export --checkpoint_path outputs/run/checkpoints/000060 --output_dir outputs/exported
    python -m scripts.export --checkpoint_path ... --form original --output_dir ckpts/transformer/480p_t2v_sage
    python -m scripts.export --lora_path lora --output_dir outputs/exported_lora  for diffusers, or --form peft
    python -m scripts.export --lora_path lora --form comfyui --output_dir outputs/for_comfyui
    python -m scripts.export --lora_path lora --merge --pretrained_model_root ./ckpts \\
        --transformer_version 480p_t2v --output_dir outputs/merged
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import new_folder_problem, publish, remove_partial
from hyvideo.files.text import quote

if TYPE_CHECKING:
    from torch import nn

    from hyvideo.models.guidance import Expert
    from hyvideo.models.lora import Lora

IN_DIFFUSERS = "in diffusers: "  # before the line that loads a model there


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint_path", type=Path, help="checkpoint of a run")
    parser.add_argument("--lora_path", type=Path, help="file or folder of a LoRA")
    parser.add_argument(
        "--merge", action="store_true", help="merge the LoRA into the model's weights"
    )
    parser.add_argument(
        "--form",
        choices=["diffusers", "original", "comfyui", "peft"],
        default="diffusers",
        help="output format",
    )
    parser.add_argument(
        "--output_dir", dest="out", type=Path, required=True, help="output folder, new or empty"
    )
    parser.add_argument(
        "--pretrained_model_root",
        help="base checkpoints, or their repository on the Hugging Face Hub; default: the run's, or "
        "./ckpts",
    )
    parser.add_argument(
        "--transformer_version", help="version of the base model; default: the run's"
    )
    parser.add_argument(
        "--expert",
        choices=["high", "low"],
        help="expert of a model of two that was trained; default: the run's, or as the LoRA says",
    )
    parser.add_argument(
        "--ignore_lora_expert",
        action="store_true",
        help="accept a LoRA that says that it is for the other expert",
    )
    for name, model in (
        ("base_lora_path", "base model"),
        ("low_noise_base_lora_path", "low-noise expert"),
    ):
        parser.add_argument(
            f"--{name}",
            type=Path,
            help=f"LoRA that the {model} had in training; default: the run's",
        )
    parser.add_argument(
        "--family",
        help="folder or module of a model family outside the repository; default: the run's",
    )
    parser.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="precision of the files"
    )
    parser.add_argument(
        "--push_to_hub",
        metavar="OWNER/NAME",
        help="also publish the folder as this repository of the Hugging Face Hub, with your login",
    )
    options = parser.parse_args()

    from safetensors import SafetensorError  # such as a full disk

    with exit_on_error("export.py", (ValueError, OSError, SafetensorError)):
        lines = run(options)
        print(f"written to {options.out}", *lines, sep="\n")
        if options.push_to_hub:
            from hyvideo.weights.hub import push

            print(f"published as {push(options.out, options.push_to_hub)}")


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit each other, or a folder with files."""
    problem = new_folder_problem(options.out)
    if problem:
        raise ValueError(
            f"--output_dir must be a new or empty folder, got {quote(options.out)}: {problem}"
        )
    if options.form == "peft" and not exports_lora(options):
        raise ValueError("--form peft is a LoRA format: give --lora_path alone, without --merge")
    if (
        options.checkpoint_path is None
        and options.lora_path is None
        and options.transformer_version is None
    ):
        raise ValueError(
            "nothing to export: give --checkpoint_path, --lora_path, or --transformer_version"
        )


def exports_lora(options: argparse.Namespace) -> bool:
    """Return whether a LoRA is written, and not a whole model."""
    return options.lora_path is not None and not options.merge and not options.checkpoint_path


def run(options: argparse.Namespace) -> list[str]:
    """Write the files and return how other programs load them, as lines."""
    from hyvideo.checkpoints.format import saved_lora, saved_policy

    options.checkpoint_path = options.checkpoint_path and saved_policy(options.checkpoint_path)
    options.lora_path = options.lora_path and saved_lora(options.lora_path)
    check_options(options)
    if options.push_to_hub:
        from hyvideo.weights.hub import check_login

        check_login(options.push_to_hub)

    from hyvideo.loading.run_settings import settings_of_run
    from hyvideo.models.registry import register

    checkpoint = checkpoint_of(options)
    run_settings = settings_of_run(checkpoint)[0] if checkpoint else {}
    register(options.family or run_settings.get("family", ""))
    with new_folder(options.out) as out:
        if exports_lora(options):
            lines = export_lora(options, out)
        else:
            lines = export_model(options, run_settings, out)
        lines += describe(options, run_settings, checkpoint, out, lines)
        for file in out.rglob("*.safetensors"):  # safetensors makes them private to their owner
            file.chmod((out / "README.md").stat().st_mode)
    return lines


def checkpoint_of(options: argparse.Namespace) -> Path | None:
    """Return the checkpoint of a run that is exported, of which a LoRA may be a folder."""
    if options.checkpoint_path or options.lora_path is None:
        return options.checkpoint_path
    from hyvideo.checkpoints.format import checkpoint_around

    return checkpoint_around(options.lora_path)


def export_lora(options: argparse.Namespace, out: Path) -> list[str]:
    """Export a LoRA into the folder ``out``."""
    from hyvideo.loading.saved_policy import read_saved_lora
    from hyvideo.models.lora import differences_of
    from hyvideo.models.lora_files import expert_of
    from hyvideo.models.lora_saving import save_lora

    expert = options.expert or expert_of(options.lora_path)
    lora = read_saved_lora(options.lora_path, expert, ignore_expert=options.ignore_lora_expert)
    changed = sorted(differences_of(lora))
    if changed and options.form in ("diffusers", "peft"):
        raise ValueError(
            f"--form {options.form} has no place for the changes of {len(changed)} whole "
            f"parameters that the LoRA needs, the first {changed[0]}. Use --merge, which "
            "writes a whole model, or --form comfyui, whose .diff tensors LightX2V reads"
        )
    save_lora(lora, out, form=options.form, expert=expert)
    (file,) = out.glob("*.safetensors")
    return lora_lines(options.out / file.name, options.form, lora, expert)


def describe(
    options: argparse.Namespace,
    run_settings: Mapping[str, Any],
    checkpoint: Path | None,
    out: Path,
    lines: list[str],
) -> list[str]:
    """Write the model card and the license into the folder ``out``; return what the user must add."""
    from hyvideo.models.family import License, family_named
    from hyvideo.models.model_card import copy_license, write_card
    from hyvideo.models.versions import version_defaults

    settings = dict(run_settings)
    if options.transformer_version:
        settings["transformer_version"] = options.transformer_version
    version = version_defaults(settings.get("transformer_version"))
    license = family_named(version.family).license if version.family else None
    if version.license:  # the Hub names a license like SPDX, in lower case, or "other"
        is_name = " " not in version.license
        license = License(version.license.lower() if is_name else "other", version.license)
    name = options.push_to_hub or options.out.resolve().name
    write_card(
        out,
        name=name.rpartition("/")[2],
        is_lora=exports_lora(options),
        license=license,
        lines=[line.strip().replace(str(options.out), name) for line in lines],
        settings=settings,
        checkpoint=checkpoint,
    )
    root = options.pretrained_model_root or run_settings.get("pretrained_model_root")
    copied = copy_license(Path(root), out) if root else []
    if license and license.must_be_copied and not copied:
        return [
            f"before you publish it: the license ({license.link}) asks that its text and its notice "
            f"lie beside the weights; copy them into {options.out}"
        ]
    return []


def lora_lines(file: Path, form: str, lora: "Lora", expert: "Expert | None") -> list[str]:
    """Return how other programs load a written LoRA, as lines."""
    from hyvideo.models.lora import differences_of
    from hyvideo.models.lora_saving import family_of_lora

    transformer = "transformer_2" if expert == "low" else "transformer"
    second = ", load_into_transformer_2=True" if expert == "low" else ""
    family = family_of_lora(lora)
    out = file.parent
    if form == "peft":
        return [f'in peft: PeftModel.from_pretrained(pipeline.{transformer}, "{out}")']
    if form == "diffusers" and family and family.lora_prefix:
        return [f'in diffusers: pipeline.load_lora_weights("{out}"{second})']
    if form == "diffusers":
        return [
            f'in diffusers: pipeline.{transformer}.load_lora_adapter("{out}", use_safetensors=True)'
        ]
    lines = []
    if form == "comfyui" or family.lora_prefix:
        model = f", and apply it to the {expert}-noise model only" if expert else ""
        lines.append(
            f"in ComfyUI: copy {file} to ComfyUI/models/loras under a name of your own{model}"
        )
    if family.lora_prefix:
        dit = "dit2" if expert == "low" else "dit"
        # offline, diffusers finds only files of the usual name
        name = f', weight_name="{file.name}"' if expert else ""
        lines += [
            f'in diffusers: pipeline.load_lora_weights("{out}"{name}{second})',
            f'in DiffSynth-Studio: pipe.load_lora(pipe.{dit}, "{file}")',
        ]
    elif form == "original":
        adapter = f'load_lora_adapter("{out}", prefix=None, use_safetensors=True)'
        lines += [
            f"in the program of the model's authors: transformer.{adapter}",
            "in ComfyUI: export with --form comfyui",
        ]
    if family.lora_prefix or form == "original":
        lines.append(f"in LightX2V and FastVideo: the file is {file}")
    tables = [name for name in differences_of(lora) if name.endswith("scale_shift_table")]
    if tables:
        lines.append(
            f"ComfyUI and diffusers leave {len(tables)} modulation tables unchanged, diffusers also "
            "norms: for them, export a whole model with --merge. LightX2V applies all"
        )
    return lines


def export_model(
    options: argparse.Namespace, run_settings: Mapping[str, Any], out: Path
) -> list[str]:
    """Export the transformer of a checkpoint, a base model, or either with a merged LoRA, into the
    folder ``out``.
    """
    from hyvideo.models.lora_files import expert_of
    from hyvideo.models.versions import experts_of
    from hyvideo.weights.hub import local_folder

    root = options.pretrained_model_root or run_settings.get("pretrained_model_root", "ckpts")
    root = Path(local_folder(root))
    version = options.transformer_version or run_settings.get("transformer_version")
    if run_settings.get("base_weight_dtype") == "fp8":
        print(
            "the LoRA was trained on a base model in fp8; it is merged into the unquantized "
            "weights of the files"
        )
    trained = None
    if len(experts_of(version)) > 1:
        trained = options.expert or run_settings.get("expert")
        if options.lora_path and not trained:
            trained = expert_of(options.lora_path)
        if (options.lora_path or options.checkpoint_path) and not trained:
            raise ValueError(
                f"transformer_version {version} has two experts, and nothing says which one was "
                "trained; set --expert high or --expert low"
            )
    lines = []
    for expert in experts_of(version):
        changes = {}
        if expert == trained:
            changes = {"checkpoint": options.checkpoint_path, "lora": options.lora_path}
        lines += export_transformer(
            root, version, options, run_settings, out, expert=expert, **changes
        )
    if options.form == "diffusers" and lines[0].startswith(IN_DIFFUSERS):
        names = [f"{folder.name}={folder.name}" for folder in sorted(out.iterdir())]
        lines.append(
            f"              pipeline = DiffusionPipeline.from_pretrained(MODEL, {', '.join(names)})"
        )
    return lines


def export_transformer(
    root: Path,
    version: str | None,
    options: argparse.Namespace,
    run_settings: Mapping[str, Any],
    out: Path,
    *,
    expert: "Expert | None",
    checkpoint: Path | None = None,
    lora: Path | None = None,
) -> list[str]:
    """Write one transformer into the folder ``out``, and return how other programs load it."""
    import diffusers

    from hyvideo.loading.model_setup import base_loras
    from hyvideo.loading.saved_policy import load_merged
    from hyvideo.models.family import component_of, family_of
    from hyvideo.models.loading import TRANSFORMERS
    from hyvideo.models.saving import save_original
    from hyvideo.pipelines.grpo_pipeline import DTYPES
    from hyvideo.settings.sections import ModelSettings

    dtype = DTYPES[options.dtype]
    base = {
        name: str(getattr(options, name) or run_settings.get(name, ""))
        for name in ("base_lora_path", "low_noise_base_lora_path")
    }
    model = ModelSettings(
        pretrained_model_root=str(root),
        transformer_version=version or "",
        ignore_lora_expert=options.ignore_lora_expert
        or run_settings.get("ignore_lora_expert", False),
        **base,
    )
    transformer = load_merged(
        root,
        version,
        checkpoint=checkpoint,
        lora=lora,
        dtype=dtype,
        expert=expert,
        ignore_expert=options.ignore_lora_expert,
        bases=base_loras(model, expert),
    )
    if options.form in ("original", "comfyui"):
        folder = Path(TRANSFORMERS[expert][-1]) if expert else Path()
        rename = None
        if options.form == "comfyui":
            rename = family_of(transformer).model_to_comfyui
            if rename is None:
                raise ValueError(f"--form comfyui: ComfyUI's names of {version} are not known")
        save_original(transformer, out / folder, dtype=dtype, rename=rename)
        return original_model_lines(options.out / folder, options.form, transformer)
    folder = TRANSFORMERS[expert][0]
    transformer.save_pretrained(out / folder)
    name = component_of(transformer).class_name
    if not hasattr(diffusers, name):  # a class of a family outside of it
        return [
            f"in this project: use {options.out / folder} in place of the base model's {folder}"
        ]
    return [
        f'{IN_DIFFUSERS}{folder} = {name}.from_pretrained("{options.out}", subfolder="{folder}", '
        f"torch_dtype={dtype})"
    ]


def original_model_lines(out: Path, form: str, transformer: "nn.Module") -> list[str]:
    """Return how other programs load a model in the layout of its authors or of ComfyUI, as lines."""
    from hyvideo.models.family import family_of
    from hyvideo.models.loading import WEIGHTS_STEM

    file = out / f"{WEIGHTS_STEM}.safetensors"
    lines = []
    if form == "original":
        lines.append("in the program of the model's authors: use the folder as its transformer")
    if form == "comfyui" or family_of(transformer).lora_prefix:  # the same file
        lines.append(
            f"in ComfyUI: copy {file} to ComfyUI/models/diffusion_models under a name of your own"
        )
    return lines


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a hidden folder beside ``out``, which gets this name at the end."""
    remove_partial(out.parent, f"{out.name}.")  # of a killed export
    if out.is_dir():  # it is empty
        out.rmdir()
    with publish(out, is_folder=True) as hidden:
        yield hidden


if __name__ == "__main__":
    main()
