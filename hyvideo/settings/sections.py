"""Settings of a run by section: each leaf is declared once, under the flat name by which flags and
YAML files know it. Imports no torch.

    batch_size: int = layout(2, "Rollouts that a replica samples at once.", ge=1)

The function names what the setting decides:

    learning    samples, rewards or updates: another value is another experiment
    layout      how an iteration's rollouts are distributed; may change while their number stays the same
    machine     how and how long a run computes, or when it stops with an error, but not what it learns
    records     which outputs of a run are kept, and where
    start       this start of the program only
"""

import json
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from hyvideo.files.cli import TRUTHS
from hyvideo.files.text import nearest, quote
from hyvideo.models.guidance import Expert, parse_interval
from hyvideo.models.versions import version_defaults
from hyvideo.schedulers.noise_matching import parse_target
from hyvideo.schedulers.transitions import SAMPLERS, parse_sigmas
from hyvideo.settings.reference_flags import REFERENCE_SCORERS

MAX_THREADS = 1024  # above the cores of a node; many more threads than cores cannot be created
# beyond any model, so that planning a typo takes no minutes
MAX_SIDE = 16_384
MAX_FRAMES = 10_001
MAX_STEPS = 1000

Decides = Literal["learning", "layout", "machine", "records", "start"]
Switch = Literal["auto", "true", "false"]  # auto: chosen by the device
# A number, or SAMPLER:ETA
NoiseScale = Annotated[float, Field(ge=0, le=1000)] | Annotated[str, Field(pattern=":")]


class Section(BaseModel):
    """Settings that belong together, from the text of flags and the values of a YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _in_form(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a value in the form of its setting, where it differs from what pydantic reads."""
        leaf = leaves_of(cls)[info.field_name]
        if leaf.is_list:
            words = [value] if isinstance(value, str) else value
            return [] if words == [""] else words
        if leaf.kind is Path and not str(value).strip():  # such as that of an unset variable
            raise ValueError(f"{leaf.name}: a path must not be empty, got {value!r}")
        if leaf.kind is Switch:
            return {True: "true", False: "false"}.get(TRUTHS.get(str(value).lower()), value)
        if isinstance(value, bool) and leaf.kind is not bool:
            raise ValueError(
                f"{leaf.name} must not be a bool, got {str(value).lower()} (YAML reads yes, no, on "
                "and off as bools); put text in quotes"
            )
        if get_origin(leaf.kind) is dict and isinstance(value, str):
            return _parsed(leaf.name, value)
        if isinstance(value, dict) and leaf.kind is str:  # reward_weights and reward_config
            return json.dumps(value)
        if isinstance(value, int | float) and leaf.kind is str:  # such as ``sigmas: 1``
            return str(value)
        return value


def _parsed(name: str, text: str) -> Any:
    """Return the value of JSON; {} for none."""
    try:
        return json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(
            f"{name} must be JSON, such as '{{\"Overall\": 1}}', got {quote(text)}"
        ) from error


class Leaf(NamedTuple):
    """A setting, as its section declares it."""

    name: str
    field: FieldInfo
    kind: Any  # type of the values other than None, which stands for a default that others decide
    default: Any
    sentence: str
    decides: Decides
    is_path: bool
    measured: bool
    choices: list[str]

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is list

    @property
    def element(self) -> Any:
        """Type of an element of a list, or of the value."""
        return get_args(self.kind)[0] if self.is_list else self.kind


@cache
def leaves_of(cls: type[Section]) -> dict[str, Leaf]:
    """Return the settings of a section, by name."""
    return {name: leaf_of(name, field) for name, field in cls.model_fields.items()}


def leaf_of(name: str, field: FieldInfo) -> Leaf:
    """Return the setting that a field declares."""
    kind = field.annotation
    members = [member for member in get_args(kind) if member is not type(None)]
    if type(None) in get_args(kind):
        kind = members[0]
    return Leaf(
        name, field, kind, field.get_default(), field.description, **field.json_schema_extra
    )


def setting(
    decides: Decides,
    default: Any,
    sentence: str,
    *,
    is_path: bool = False,  # files or folders, relative to the working directory at the start
    measured: bool = False,  # the value affects an evaluation of a policy; false for paths
    choices: Collection[str] = (),  # built-in names of a setting that may also be FILE.py:NAME
    **limits: float,  # ge, gt, le, lt
) -> Any:
    """Return a field of a section."""
    traits = {"decides": decides, "is_path": is_path, "measured": measured}
    extra = traits | {"choices": list(choices)}
    return Field(default, description=sentence, json_schema_extra=extra, **limits)


learning, layout, machine, records, start = (
    partial(setting, decides) for decides in ("learning", "layout", "machine", "records", "start")
)


class ModelSettings(Section):
    """Model, precision and device."""

    pretrained_model_root: str = machine(
        "./ckpts",
        "Checkpoint folder, in the original or the diffusers layout, or a repository on the Hugging "
        "Face Hub in diffusers' layout, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers.",
        is_path=True,
    )
    transformer_version: str = learning(
        "480p_t2v", "Model version: a folder under <root>/transformer.", measured=True
    )
    family: str = learning(
        "",
        "Folder of a model family outside the repository (docs/extend.md#add-a-model).",
    )
    expert: Expert = learning(
        "high",
        "Trained transformer of a model of two experts, of high or low noise levels; the other is "
        "its frozen partner.",
    )
    dtype: Literal["bf16", "fp32"] = learning(
        "bf16", "Compute precision of the transformer.", measured=True
    )
    base_weight_dtype: Literal["bf16", "fp8"] = learning(
        "bf16",
        "Precision in which a LoRA run stores the frozen weights: bf16 (the precision of "
        "dtype), or fp8, which needs torchao.",
    )
    base_lora_path: str = learning(
        "",
        "LoRA to merge into the base model (of two experts: the high-noise one) before a new LoRA "
        "is added, such as that of a student of 4 steps.",
        is_path=True,
    )
    low_noise_base_lora_path: str = learning(
        "", "LoRA to merge into the low-noise expert.", is_path=True
    )
    ignore_lora_expert: bool = learning(
        False,
        "Accept LoRAs that say, in their header or name, that they are for the other expert of a "
        "model of two.",
    )
    partner_weight_dtype: Literal["bf16", "fp8"] = learning(
        "bf16", "Precision in which the frozen expert is stored, as in base_weight_dtype."
    )
    offload: list[Literal["vae", "reward", "anchor", "policy", "partner"]] = machine(
        [],
        "What waits on the CPU until it is used: vae; reward (scorers, which then score after all "
        "rollouts of an iteration instead of beside them); anchor (and the EMA); policy (the frozen "
        "weights of a LoRA run, while scorers work); partner (the frozen expert, whose blocks are "
        "copied to the GPU as they compute).",
    )
    encoder_dtype: Literal["fp16", "bf16", "fp32"] = learning(
        "fp16",
        "Precision of the encoders. HunyuanVideo-1.5 was trained with fp16; Wan computes in bf16 "
        "instead.",
        measured=True,
    )
    vae_dtype: Literal["fp16", "bf16", "fp32"] | None = learning(
        None, "Precision of the VAE; default: the value of the version.", measured=True
    )
    vae_tile_size: int = machine(
        256, "Tile size of VAE decoding in pixels; 0 disables tiling.", ge=0, measured=True
    )
    vae_tile_overlap: float = machine(
        0.125, "Overlap as a fraction of a tile.", ge=0, lt=1, measured=True
    )
    precompute_conditions: bool = machine(
        False, "Encode all prompts before training, then free the encoders."
    )
    conditions_dir: str = machine(
        "",
        "Folder of encoded prompts; default if precomputed: <output_dir>/conditions.",
        is_path=True,
    )
    random_weights: bool = learning(
        False, "Initialize weights at random, for smoke tests.", measured=True
    )
    device: Literal["auto", "cuda", "cpu"] = machine(
        "auto", "Device; auto uses a GPU if there is one."
    )
    attention_kernel: Literal["auto", "cudnn", "flash", "flash3", "efficient", "torch", "sage"] = (
        machine(
            "auto",
            "Attention kernel; auto: the fastest that works; torch: torch's choice; sage: only "
            "to generate.",
        )
    )
    num_threads: int = machine(
        0, "CPU threads per process; 0 uses PyTorch's default.", ge=0, le=MAX_THREADS
    )

    @property
    def trained_expert(self) -> Expert | None:
        """The trained expert; None for a model of a single transformer."""
        boundary = version_defaults(self.transformer_version).boundary
        return None if boundary is None else self.expert


class DataSettings(Section):
    """Prompts and video size."""

    prompts_csv: list[str] = learning(
        ["assets/prompts/train.csv"],
        "Files or folders of prompts: one in each line, or tables with `prompt`, optionally "
        "`ref_image_path` and `ref_last_image_path`.",
        is_path=True,
    )
    valid_video_csv: list[str] = records(
        [], "Validation prompts, in the same forms; default: none.", is_path=True
    )
    negative_prompt: str | None = learning(
        None,
        "Negative prompt of rollouts and validation; default: the value of the version.",
        measured=True,
    )
    height: int = learning(352, "Height of a rollout in pixels.", ge=1, le=MAX_SIDE, measured=True)
    width: int = learning(624, "Width of a rollout in pixels.", ge=1, le=MAX_SIDE, measured=True)
    sample_n_frames: int = learning(
        81,
        "Frames of a rollout: 1 and a multiple of the VAE's temporal compression.",
        ge=1,
        le=MAX_FRAMES,
        measured=True,
    )
    fps: float | None = learning(
        None,
        "Frames per second of the videos; default: the value of the version.",
        ge=0.01,
        le=1000,
        measured=True,
    )
    fit: Literal["crop", "pad", "none"] = learning(
        "crop",
        "How given videos of another size become height x width: cut at the sides (crop), with black "
        "borders (pad), or not at all (none).",
    )
    seed: int = learning(42, "Random seed of the run.", ge=0)


class RolloutSettings(Section):
    """Number of rollouts, and the sampler."""

    batch_size: int = layout(2, "Rollouts that a replica samples at once.", ge=1)
    num_generations: int = learning(4, "Group size: rollouts per prompt.", ge=1)
    gradient_accumulation_steps: int = layout(
        1, "Batches per iteration; rollouts per iteration = batch_size x this x replicas.", ge=1
    )
    sde_type: str = learning(
        "sage_grpo",
        "SDE of the rollouts (docs/methods.md#samplers), or FILE.py:NAME.",
        is_path=True,
        choices=SAMPLERS,
    )
    eta: NoiseScale = learning(
        0.5,
        "Noise scale of the SDE; SAMPLER:ETA, such as sage_grpo:0.7: the one at which the SDE adds as "
        "much noise in total as that sampler at that eta.",
    )
    grpo_sampling_steps: int = learning(20, "Denoising steps of a rollout.", ge=1, le=MAX_STEPS)
    shift: float | None = learning(
        None, "Sigma shift; default: the value of the version.", ge=0.001, measured=True
    )
    sigmas: str | None = learning(
        None,
        "Noise level of each step, such as 1,0.757,0.522; replaces shift; default: the levels "
        "of the version, or of shift.",
        measured=True,
    )
    cfg_scale: float | None = learning(
        None,
        "Guidance scale; 1 or less disables guidance; default: the value of the version.",
        measured=True,
    )
    low_noise_cfg_scale: float | None = learning(
        None,
        "Guidance scale of the low-noise expert, of two; default: the value of the version.",
        measured=True,
    )
    guidance_interval: str = learning(
        "", "Sigmas with guidance, LOW:HIGH; default: all.", measured=True
    )
    batched_forward: Switch = machine(
        "auto", "Batch samples and guidance branches in a forward pass; auto: on a CPU."
    )
    last_step: Literal["stochastic", "deterministic"] = learning(
        "stochastic", "The last step adds noise, or takes the mean and is not trained."
    )
    reference_conventions: bool = learning(
        False,
        "Follow the public reference where its anchor KL, equalizer, KL warm-up or last step of "
        "CPS differs from the equations (docs/appendix.md).",
    )
    use_same_noise: bool = learning(False, "Share the initial noise in a group.")
    decode_batch_size: int = machine(1, "Videos that the VAE decodes together.", ge=1)

    @field_validator("sde_type")
    @classmethod
    def _is_built_in_or_in_a_file(cls, name: str) -> str:
        if name not in SAMPLERS and ".py:" not in name:  # a file is read where it is used
            raise ValueError(
                f"sde_type must be one of {', '.join(SAMPLERS)} or FILE.py:NAME, got "
                f"{quote(name, 80)}; {nearest(name, SAMPLERS) or 'correct the name'}"
            )
        return name

    @field_validator("eta", mode="before")
    @classmethod
    def _is_a_number_or_the_noise_of_a_sampler(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return float(value)
        except ValueError:
            parse_target(value)
        return value

    @field_validator("sigmas")
    @classmethod
    def _sigmas_decrease(cls, text: str | None) -> str | None:
        parse_sigmas(text)
        return text

    @field_validator("guidance_interval")
    @classmethod
    def _is_an_interval(cls, text: str) -> str:
        parse_interval(text)
        return text


class RewardSettings(Section):
    """Reward models, their weights, and advantages."""

    reward_model: list[str] = learning(
        ["videoalign"],
        "Scorers: names, FILE.py:CLASS, or entries with name, weight and options (docs/rewards.md).",
        measured=True,
    )
    reward_weights: str = learning(
        "alignment",
        "Weights of the dimensions: `averaged` or A (VQ, MQ, TA 1, 1, 1), `alignment` or B "
        "(0.5, 0.5, 1), or JSON.",
        measured=True,
    )
    reward_normalization: Literal["none", "group"] = learning(
        "none",
        "group: divide each dimension by its standard deviation in the group before weighting.",
    )
    held_out_reward_model: list[str] = records(
        [], "Scorers that only measure validation videos and never reward."
    )
    reward_config: str = learning("", "Options by scorer: a YAML file, or JSON.", is_path=True)
    max_missing_fraction: float = machine(
        0.25, "Fraction of failed rewards above which the run stops.", ge=0, le=1
    )
    ignore_rewards: bool = learning(
        False, "Control run: set all advantages to 0 and train on the KL terms alone."
    )
    advantage_clip: float = learning(5.0, "Clip advantages to plus or minus this value.", gt=0)

    @field_validator("reward_model", "held_out_reward_model")
    @classmethod
    def _have_names_of_this_program(cls, names: list[str]) -> list[str]:
        return [REFERENCE_SCORERS.get(name, name) for name in names]

    @property
    def scorers(self) -> list[str]:
        """Scorers that reward or measure."""
        return [*self.reward_model, *self.held_out_reward_model]


class OptimizerSettings(Section):
    """Optimizer, EMA and LoRA."""

    max_steps: int = machine(10000, "Number of iterations.", ge=1)
    learning_rate: float = learning(1e-05, "Learning rate.", gt=0)
    weight_decay: float = learning(0.01, "Decoupled weight decay.", ge=0)
    betas: list[float] = learning([0.9, 0.999], "Decay rates of AdamW's two moments.")
    adam_epsilon: float = learning(1e-08, "AdamW's epsilon.", gt=0)
    max_grad_norm: float = learning(1.0, "Clip gradients to this global norm.", gt=0)
    max_bad_updates: int = machine(3, "Consecutive updates with NaN or inf that end the run.", ge=1)
    warmup_steps: int = learning(0, "Updates of linear learning-rate warmup.", ge=0)
    optimizer: Literal["muon", "muon_all", "adamw"] = learning(
        "muon",
        "Muon for the matrices of the blocks and AdamW for the rest, Muon for all matrices "
        "(muon_all), or AdamW alone.",
    )
    ema_decay: float = learning(
        0.0, "EMA decay of the weights per update; 0 disables the EMA.", ge=0, lt=1
    )
    lora_rank: int = learning(0, "Rank of the LoRA to train; 0 trains all weights.", ge=0)
    lora_alpha: float = learning(
        0.0, "The LoRA is scaled by alpha / rank; 0: alpha is twice the rank.", ge=0
    )
    pretrained_lora_path: str = learning(
        "", "LoRA to continue or, with lora_rank 0, to merge into the base model.", is_path=True
    )
    lora_target_modules: list[str] = learning(
        [],
        "Modules that get a LoRA, as name endings or regular expressions; default: the matrices "
        "of the blocks.",
    )


class DistributedSettings(Section):
    """Parallelism, activation checkpointing and compilation."""

    sp_size: int = machine(1, "Ranks that share one video by sequence parallelism.", ge=1)
    dp_replicate: int = machine(1, "Copies of the sharded model; 1 shards over all ranks.", ge=1)
    enable_fsdp: bool = machine(False, "Shard parameters, gradients and optimizer state with FSDP.")
    reshard_after_forward: bool = machine(True, "Free gathered weights after each forward pass.")
    activation_checkpointing: Literal["none", "auto", "full", "selective"] = machine(
        "none",
        "Recompute all (full), or all but attention (selective), in the backward pass, which saves "
        "memory; auto: the fastest that fits.",
    )
    enable_compile: Switch = machine("auto", "Compile the transformer's blocks; auto: on a GPU.")
    deterministic: bool = machine(False, "Use only deterministic GPU kernels; slower.")
    timeout: float = machine(
        1800.0,
        "Seconds until a hanging rank ends the run; after half of it, each rank prints its stage.",
        gt=0,
    )

    @property
    def report_after(self) -> float:
        """Seconds until the watchdog reports a stage."""
        return self.timeout / 2

    @property
    def reward_deadline(self) -> float:
        """Seconds to wait for rewards: less than the time-out, so that late ones do not look
        like a lost rank.
        """
        return 0.8 * self.timeout


class ValidationSettings(Section):
    """Validation videos: as those of the rollouts where nothing else is set."""

    validation_interval: int = records(50, "Iterations between validations.", ge=1)
    validation_steps: int | None = records(
        None,
        "ODE steps of validation videos; default: the value of the version, or the number of "
        "sigmas.",
        ge=1,
        le=MAX_STEPS,
        measured=True,
    )
    validation_seed: int = records(930, "Seed of the validation noise.", ge=0, measured=True)
    validation_repeats: int = records(
        1, "Validation videos per prompt.", ge=1, le=1000, measured=True
    )
    validation_batch_size: int = records(1, "Validation videos sampled together.", ge=1)
    validation_num_frames: int = records(
        0, "Frames of validation videos; 0: sample_n_frames.", ge=0, le=MAX_FRAMES
    )
    validation_eta: float | None = records(
        None,
        "Noise scale of the SDE in validation, for models that sample with noise; 0: the ODE; "
        "default: the value of the version.",
        ge=0,
        le=1000,
        measured=True,
    )
    validation_shift: float | None = records(None, "Shift in validation; default: shift.", gt=0)
    validation_cfg_scale: float | None = records(
        None, "Guidance scale in validation; default: cfg_scale."
    )
    validation_low_noise_cfg_scale: float | None = records(
        None, "Guidance scale of the low-noise expert in validation; default: low_noise_cfg_scale."
    )
    validate_at_step0: bool = records(True, "Validate the base model before training.")
    validation_height: int = records(
        0, "Height of validation videos in pixels; 0: height.", ge=0, le=MAX_SIDE
    )
    validation_width: int = records(
        0, "Width of validation videos in pixels; 0: width.", ge=0, le=MAX_SIDE
    )
    on_reward_hacking: Literal["warn", "stop"] = records(
        "warn", "When the reward rises and a held-out metric degrades: warn, or save and stop."
    )
    hacking_threshold: float = records(
        1.5, "Allowed held-out shift in standard deviations of the base model.", gt=0
    )


class RecordSettings(Section):
    """Metrics, videos and checkpoints."""

    output_dir: str = records(
        "./outputs", "Folder of metrics, videos and checkpoints.", is_path=True
    )
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "none"]] = (
        records(
            ["tensorboard"],
            "Trackers besides metrics.jsonl: tensorboard, wandb, trackio, mlflow, swanlab, or none.",
        )
    )
    report: bool = records(True, "Write report.html at every validation and at the end of the run.")
    save_interval: int = records(
        50, "Iterations between checkpoints; the last iteration is always saved.", ge=1
    )
    save_minutes: float = records(
        60.0, "Also save after this many minutes, at the end of an iteration; 0: never.", ge=0
    )
    save_total_limit: int = records(3, "Checkpoints to keep; 0 keeps all.", ge=0)
    save_asynchronously: bool = records(
        True, "Write checkpoints in the background, from a copy on the CPU."
    )
    resume_from_checkpoint: str = start(
        "auto",
        "auto (or latest): continue the run in output_dir from its newest complete checkpoint, "
        "or start one; a folder: start from this checkpoint.",
        is_path=True,
    )
    allow_changed_settings: list[str] = start(
        [],
        "Settings and inputs that affect learning and may differ from those of the run that is "
        "resumed, by name; all: any.",
    )
    log_video_interval: int = records(
        10, "Iterations between saved rollout videos; 0 saves none.", ge=0
    )
    record: Literal["none", "numbers", "all"] = records(
        "numbers",
        "What audit.jsonl has of an iteration for scripts.audit: the rollouts and updates, or also "
        "each term of the loss.",
    )
    log_num_videos: int = records(4, "Videos to save per iteration or validation.", ge=0)
