"""Every setting: name, default and one sentence, once. A YAML file sets a run and a flag overrides it.

Flags keep the names and the meaning of the public reference implementation. Rules between settings are in
``hyvideo.config.run_plan``, which also prints the arithmetic of a run.
"""

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyvideo.config.settings_file import flags_of_file
from hyvideo.config.yaml_files import read_yaml
from hyvideo.data.outside import BriefErrors, shown
from hyvideo.models.versions import version_defaults
from hyvideo.schedulers.noise_matching import matched_eta


def _setting(default, sentence: str):
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": sentence})
    return field(default=default, metadata={"help": sentence})


@dataclass(frozen=True)
class ModelSettings:
    pretrained_model_root: str = _setting("./ckpts", "Folder of the checkpoints, in the original or diffusers layout.")
    transformer_version: str = _setting("480p_t2v", "Which transformer under <root>/transformer to train.")
    dtype: Literal["bf16", "fp32"] = _setting("bf16", "Precision in which the transformer computes.")
    master_weight_type: Literal["fp32", "bf16"] = _setting(
        "fp32", "Precision of the weights in training and of the optimizer's state; frozen weights have that of dtype."
    )
    encoder_dtype: Literal["fp16", "bf16", "fp32"] = _setting("fp16", "Precision of the text and vision encoders.")
    vae_dtype: Literal["fp16", "bf16", "fp32"] = _setting("fp16", "Precision in which videos are decoded.")
    vae_tile_size: int = _setting(256, "Side in pixels of the tiles in which a video is decoded; 0 decodes it whole.")
    vae_tile_overlap: float = _setting(0.125, "Part of a tile that its neighbour covers too.")
    precompute_conditions: bool = _setting(
        False, "Encode all prompts of the run before it begins, and let the encoders' memory go."
    )
    conditions_dir: str = _setting(
        "",
        "Folder that keeps encoded prompts for later runs; <output_dir>/conditions with precompute_conditions.",
    )
    random_weights: bool = _setting(False, "Draw weights at random and read configurations only, for smoke tests.")
    device: Literal["auto", "cuda", "cpu"] = _setting("auto", "Where to compute; auto takes a GPU if there is one.")
    num_threads: int = _setting(0, "CPU threads of a process; 0 leaves the choice to torch.")


@dataclass(frozen=True)
class DataSettings:
    prompts_csv: str = _setting("", "CSV with a column `prompt`, and perhaps `ref_image_path`: what to train on.")
    valid_video_csv: str = _setting("", "CSV of the same kind: what to validate on; none by default.")
    height: int = _setting(352, "Height of a rollout in pixels.")
    width: int = _setting(624, "Width of a rollout in pixels.")
    sample_n_frames: int = _setting(81, "Frames of a rollout; 4n + 1.")
    fps: float = _setting(24.0, "Frames per second of the videos, for files and the reward.")
    seed: int = _setting(42, "Seed of the run; every random number is derived from it.")


@dataclass(frozen=True)
class RolloutSettings:
    batch_size: int = _setting(2, "Rollouts of a data-parallel replica in one batch.")
    num_generations: int = _setting(4, "Group size: rollouts of one prompt.")
    gradient_accumulation_steps: int = _setting(1, "Batches of rollouts that one iteration samples and trains on.")
    sde_type: Literal["sage_grpo", "flow_grpo", "dance_grpo", "cps"] = _setting("sage_grpo", "The stochastic sampler.")
    eta: float = _setting(0.5, "Exploration scale of the sampler.")
    match_noise: str = _setting(
        "",
        "Choose eta so that the steps inject as much noise in total as another SDE does, such as `sage_grpo:0.5`; or "
        "`recommended`, what the method's own video recipe sets.",
    )
    grpo_sampling_steps: int = _setting(20, "Denoising steps of a rollout.")
    shift: float | None = _setting(None, "Shift of the noise schedule; that of the version by default, else 5.")
    cfg_scale: float | None = _setting(
        None,
        "Guidance scale, in rollout, update and anchor alike; 1 or less runs one branch. That of the version by "
        "default, else 6.",
    )
    batch_guidance: bool = _setting(True, "Run both guidance branches as one batch of two; false saves memory.")
    sde_window: str = _setting(
        "",
        "Steps with noise, the ODE elsewhere: fixed:START:LENGTH, random:LENGTH or sliding:LENGTH[:STRIDE]; all by "
        "default.",
    )
    last_step: Literal["stochastic", "deterministic"] = _setting(
        "stochastic",
        "Whether the last step leaves its noise in the video, or takes the mean and is not trained.",
    )
    use_same_noise: bool = _setting(False, "Rollouts of a group share their initial noise.")
    decode_batch_size: int = _setting(1, "Videos that the VAE decodes together.")


@dataclass(frozen=True)
class RewardSettings:
    reward_model: list[str] = _setting(["videoalign"], "Which scorers give the reward; their dimensions are added.")
    reward_weights: str = _setting(
        "alignment",
        "Weights of the dimensions: `averaged` or A (VQ, MQ, TA 1, 1, 1), `alignment` or B (0.5, 0.5, 1), or JSON.",
    )
    reward_config: str = _setting("", "YAML of options for each scorer: `videoalign: {path: ..., batch_size: 8}`.")
    reward_checkpoint_mode: Literal["auto", "v1", "v2", "v3"] = _setting(
        "auto", "How VideoAlign's tensors are named: v1 and v3 as released, v2 by newer transformers."
    )
    reward_precision: Literal["bf16", "fp32_math"] = _setting(
        "bf16", "VideoAlign as published, or in float32, which settles ties within a group."
    )
    reward_video: Literal["memory", "file"] = _setting(
        "memory", "Score the decoded frames, or what an H.264 file keeps of them, as published numbers were made."
    )
    reward_offload: bool = _setting(False, "Keep the scorers on the CPU while they have nothing to do.")
    reward_retries: int = _setting(1, "Times that a failed batch is scored again before its videos one by one.")
    check_reward: bool = _setting(True, "Try the scorers on one clip before the run begins.")
    max_missing_fraction: float = _setting(0.25, "Stop when more of a round's rewards are missing.")
    remote_reward_url: str = _setting("", "Addresses of reward services, with commas, in place of scorers here.")
    remote_reward_timeout: float = _setting(120.0, "Seconds after which a reward service has failed.")
    advantage_clip: float = _setting(5.0, "Advantages are clipped to plus or minus this.")


@dataclass(frozen=True)
class LossSettings:
    clip_range: float = _setting(1e-4, "Ratios are clipped to 1 plus or minus this.")
    use_grad_balancing: bool = _setting(True, "Weight the steps by the temporal gradient equalizer.")
    enable_timestep_permutation: bool = _setting(True, "Visit the denoising steps of each rollout in a random order.")
    timestep_fraction: float = _setting(1.0, "Fraction of the stochastic steps that an update trains.")
    num_updates_per_rollout: int = _setting(1, "Optimizer updates per iteration, on mini-batches of whole groups.")
    mini_batch_size_per_update: int = _setting(1, "Rollouts in one training forward.")
    gate_interval: int = _setting(
        1, "Rounds between two checks that fresh rollouts have a ratio of 1 in training; 0 never checks."
    )
    gate_tolerance: float | None = _setting(
        None, "How far their log-ratio may be from 0; 1e-6 in fp32 and clip_range in bf16 by default."
    )


@dataclass(frozen=True)
class TrustRegionSettings:
    kl_strategy: Literal["flags", "none", "fixed", "stepwise", "moving", "dual_moving", "dual_fixed"] = _setting(
        "flags",
        "Which distances hold the policy; `flags` derives it from kl_weight, use_moving_KL and use_dual_kl.",
    )
    use_moving_KL: bool = _setting(True, "The anchor moves with the policy.")
    use_dual_kl: bool = _setting(True, "Hold position (anchor) and velocity (last policy) together.")
    update_ref_model_step: int = _setting(10, "Optimizer updates between two refreshes of a moving anchor.")
    dual_kl_moving_weight: float = _setting(1.0, "Weight of the position distance in dual strategies.")
    dual_kl_step_weight: float = _setting(0.1, "Weight of the velocity distance in dual strategies.")
    kl_velocity: Literal["log_ratio", "gaussian"] = _setting(
        "log_ratio",
        "Velocity distance: mean log-ratio of the drawn actions, or closed form between the means.",
    )
    kl_weight: float = _setting(1e-5, "Largest coefficient of the KL term; 0 turns it off.")
    kl_coef: float = _setting(1e-7, "Coefficient at the start.")
    kl_min_coef: float = _setting(1e-7, "Smallest coefficient.")
    kl_schedule: Literal["constant", "two_stage", "adaptive"] = _setting("adaptive", "Rule of the coefficient.")
    kl_feedback: Literal["paper", "lagrangian"] = _setting(
        "paper", "Whether a KL above the target lowers the coefficient (paper) or raises it."
    )
    kl_warmup_updates: int = _setting(100, "Updates over which the coefficient rises to kl_weight.")
    kl_window: int = _setting(10, "Updates whose KL the feedback averages.")
    kl_gain: float = _setting(0.1, "Strength of the feedback.")
    kl_target: float | None = _setting(None, "KL that the feedback aims at; kl_weight by default.")
    kl_compute_mode: Literal["rollout_phase", "training_phase"] = _setting(
        "rollout_phase", "Compute the anchor's means once after the rollout, or step by step in the update."
    )
    reference_mode_offload: bool = _setting(False, "Keep the anchor and the average on the CPU while not used.")


@dataclass(frozen=True)
class OptimizerSettings:
    max_steps: int = _setting(10000, "Iterations: rounds of rollouts and their training.")
    learning_rate: float = _setting(1e-5, "Learning rate.")
    weight_decay: float = _setting(0.01, "Decoupled weight decay.")
    adam_beta1: float = _setting(0.9, "AdamW's decay of the mean.")
    adam_beta2: float = _setting(0.999, "AdamW's decay of the variance.")
    adam_epsilon: float = _setting(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = _setting(1.0, "Gradients are clipped to this global norm.")
    max_bad_updates: int = _setting(3, "Stop when so many updates in a row had a loss or gradient that is not finite.")
    warmup_steps: int = _setting(0, "Updates over which the learning rate rises to its value.")
    use_muon: bool = _setting(True, "Train matrices with Muon and the rest with AdamW; false is AdamW for all.")
    muon_momentum: float = _setting(0.95, "Muon's decay of the momentum.")
    muon_scope: Literal["hidden", "all"] = _setting(
        "hidden",
        "Muon for the matrices of attention and feed-forward, or, as in the reference, for all with two dimensions.",
    )
    use_8bit_adam: bool = _setting(False, "Keep AdamW's state in 8 bits; needs torchao.")
    ema_decay: float = _setting(
        0.0, "Keep a running average of the policy with this decay an update, for validation and export; 0 keeps none."
    )
    lora_rank: int = _setting(0, "Train a LoRA of this rank and freeze the rest; 0 trains all weights.")
    lora_alpha: float = _setting(0.0, "The LoRA is scaled by alpha / rank; 0 stands for the rank.")
    lora_target_modules: str = _setting(
        "", "Regular expression of the modules that get a LoRA; all matrices of the blocks by default."
    )


@dataclass(frozen=True)
class DistributedSettings:
    sp_size: int = _setting(1, "Ranks that share one video by sequence parallelism.")
    dp_replicate: int = _setting(
        1, "Copies of the sharded model: 1 shards over all ranks; the number of nodes keeps shards within a node."
    )
    enable_fsdp: bool = _setting(False, "Shard parameters, gradients and optimizer state over the ranks.")
    reshard_after_forward: bool = _setting(
        True,
        "Let go of gathered parameters after a forward pass; false keeps them, for speed.",
    )
    gradient_sync: Literal["auto", "every", "last"] = _setting(
        "auto",
        "Reduce sharded gradients with every backward pass, or with the last of an update, when a rank must hold whole "
        "gradients; auto is last for LoRA only.",
    )
    enable_gradient_checkpointing: bool = _setting(False, "Recompute activations in the backward pass.")
    activation_checkpointing: Literal["full", "selective"] = _setting(
        "full", "What enable_gradient_checkpointing recomputes: whole blocks, or all but the results of attention."
    )
    enable_compile: bool = _setting(False, "Compile the blocks of the transformer.")
    compile_backend: str = _setting("inductor", "By what; aot_eager finds breaks in seconds.")
    collective_timeout: float = _setting(1800.0, "Seconds after which a rank that does not answer ends the run.")
    watchdog_seconds: float = _setting(
        900.0,
        "Tell on stderr which rank is in which stage, and its Python stack, when one has been there, or in one of its "
        "passes, for longer; 0 never does.",
    )


@dataclass(frozen=True)
class RecordSettings:
    output_dir: str = _setting("./outputs", "Where the run leaves everything.")
    report_to: list[str] = _setting(["tensorboard"], "Besides metrics.jsonl: tensorboard, wandb, both or none.")
    save_interval: int = _setting(50, "Iterations between checkpoints; the last iteration is always saved.")
    save_total_limit: int = _setting(3, "Checkpoints to keep; 0 keeps all.")
    keep_every: int = _setting(0, "Checkpoints of every so many iterations stay whatever save_total_limit says.")
    spool_rounds: int = _setting(
        1, "Rounds whose rollouts stay on disk for a restart; 1 is the one not trained yet, 0 keeps none."
    )
    save_asynchronously: bool = _setting(True, "Write checkpoints beside the training, from a copy on the CPU.")
    resume_from_checkpoint: str = _setting(
        "", "Folder of a checkpoint, or `latest` (or `auto`) for the newest whole one of output_dir, if there is one."
    )
    allow_changed_settings: bool = _setting(False, "Go on with a run although its method is set otherwise now.")
    log_video_interval: int = _setting(10, "Iterations between two that keep some of their videos; 0 keeps none.")
    log_num_videos: int = _setting(4, "Videos to keep of an iteration or validation.")
    validation_interval: int = _setting(50, "Iterations between validations; also before the first and after the last.")
    validation_steps: int = _setting(40, "Denoising steps of a validation video, without noise.")
    validation_seed: int = _setting(930, "Seed of the validation noise, the same every time.")
    validation_repeats: int = _setting(1, "Videos per validation prompt.")
    validation_batch_size: int = _setting(1, "Videos sampled together in a validation.")
    validation_height: int = _setting(0, "Height of a validation video; that of a rollout by default.")
    validation_width: int = _setting(0, "Width of a validation video; that of a rollout by default.")
    on_reward_hacking: Literal["warn", "stop", "rollback"] = _setting(
        "warn",
        "When a validation shows a higher reward and worse held-out measures: say so, save and end the run, or end it "
        "with `latest` at the last checkpoint before.",
    )
    hacking_threshold: float = _setting(
        1.5, "Spreads of the base policy's videos that the mean of a held-out measure may move."
    )


SECTIONS = {
    "model": ModelSettings,
    "data": DataSettings,
    "rollout": RolloutSettings,
    "reward": RewardSettings,
    "loss": LossSettings,
    "trust_region": TrustRegionSettings,
    "optimizer": OptimizerSettings,
    "distributed": DistributedSettings,
    "record": RecordSettings,
}

# The paper's settings A and B, and their names.
REWARD_PRESETS = {
    "averaged": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "alignment": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
}
REWARD_PRESETS |= {"A": REWARD_PRESETS["averaged"], "B": REWARD_PRESETS["alignment"]}


@dataclass(frozen=True)
class Config:
    """The settings of a run, by section."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    trust_region: TrustRegionSettings = TrustRegionSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    distributed: DistributedSettings = DistributedSettings()
    record: RecordSettings = field(default_factory=RecordSettings)

    def flat(self) -> dict:
        """All settings in one dict, by flag name."""
        return {name: value for section in dataclasses.asdict(self).values() for name, value in section.items()}

    def with_settings(self, **changes) -> "Config":
        """A copy in which the named settings have other values."""
        owner = {f.name: section for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
        by_section: dict[str, dict] = {}
        for name, value in changes.items():
            by_section.setdefault(owner[name], {})[name] = value
        sections = {
            section: dataclasses.replace(getattr(self, section), **values) for section, values in by_section.items()
        }
        return dataclasses.replace(self, **sections)

    def resolved(self) -> "Config":
        """A copy in which what is left to the transformer's version has the version's value, and eta is matched.

        An eta that ``match_noise`` cannot have stays as it is; ``hyvideo.config.run_plan.check`` says why.
        """
        version = version_defaults(self.model.transformer_version)
        defaults = {
            "shift": version.shift if version else 5.0,
            "cfg_scale": version.guidance_scale if version else 6.0,
        }
        own = self.flat()
        config = self.with_settings(**{name: value for name, value in defaults.items() if own[name] is None})
        try:
            return config.with_settings(eta=config.matched_eta) if config.rollout.match_noise else config
        except ValueError:
            return config

    @property
    def num_branches(self) -> int:
        """Forward passes of a velocity: 2 with guidance, else 1."""
        return 2 if self.rollout.cfg_scale > 1 else 1

    @property
    def rollout_size(self) -> tuple[int, int]:
        """Height and width of a rollout in pixels."""
        return self.data.height, self.data.width

    @property
    def validation_size(self) -> tuple[int, int]:
        """Height and width of a validation video in pixels."""
        return self.record.validation_height or self.data.height, self.record.validation_width or self.data.width

    @property
    def matched_eta(self) -> float:
        """The eta that ``match_noise`` asks for. Raises ValueError if there is none."""
        rollout = self.rollout
        return matched_eta(
            rollout.match_noise,
            rollout.sde_type,
            num_steps=rollout.grpo_sampling_steps,
            shift=rollout.shift,
            last_step=rollout.last_step,
        )

    @property
    def kl_strategy(self) -> str:
        """The strategy by its own name, whichever flags said it."""
        settings = self.trust_region
        if settings.kl_weight == 0:
            return "none"
        if settings.kl_strategy != "flags":
            return settings.kl_strategy
        moving = "moving" if settings.use_moving_KL else "fixed"
        return f"dual_{moving}" if settings.use_dual_kl else moving

    @property
    def reward_options(self) -> dict[str, dict]:
        """Options of each scorer, of the settings and of ``reward_config``, which wins. Raises ValueError for that."""
        reward = self.reward
        options: dict[str, dict] = {name: {} for name in reward.reward_model}
        if "videoalign" in options:
            options["videoalign"] = {"mode": reward.reward_checkpoint_mode, "precision": reward.reward_precision}
        if not reward.reward_config:
            return options
        path = Path(reward.reward_config)
        try:
            content = read_yaml(path)
        except ValueError as error:
            raise ValueError(f"reward_config {error}") from error
        for name, given in (content if isinstance(content, dict) else {"": None}).items():
            if name not in options or not isinstance(given, dict):
                raise ValueError(
                    f"reward_config {path} must hold a mapping of options for {', '.join(options)}, got {shown(name)}"
                )
            if of_the_run := sorted(given.keys() & {"name", "root", "device"}):
                raise ValueError(f"reward_config {path} has {', '.join(of_the_run)} for {name}, which the run decides")
            options[name] = options[name] | given
        return options

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward dimension."""
        text = self.reward.reward_weights
        return REWARD_PRESETS[text] if text in REWARD_PRESETS else flat_weights(json.loads(text))


def flat_weights(weights: dict) -> dict:
    """Weights by dimension, of a mapping that may name the scorers: ``{"videoalign": {"VQ": 0.5}, "CLIPScore": 1}``."""
    flat: dict = {}
    for name, value in weights.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


@dataclass(frozen=True)
class CommandLine:
    """What was asked for: the settings, and whether to print them and stop."""

    config: Config
    print_config: bool


def parse(argv: list[str] | None = None) -> CommandLine:
    """Settings from ``--config file.yaml`` and flags, which win.

    Ends the program with code 2 and one message for an unknown name, a value of the wrong type or an unreadable file.
    """
    argv = sys.argv[1:] if argv is None else argv
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--print_config", action="store_true")
    chosen, flags = first.parse_known_args(argv)
    parser = _settings_parser()
    from_file = _flags_of_file(chosen.config, parser) if chosen.config else []
    *sections, unknown = parser.parse_args_into_dataclasses(
        args=from_file + flags, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        parser.error(f"unknown flag {unknown[0][:200]}; --help lists the settings")
    asked, config = Config(*sections), Config(*sections).resolved()
    if asked.rollout.eta != config.rollout.eta and any(flag.split("=")[0] == "--eta" for flag in flags):
        parser.error(
            f"--eta {asked.rollout.eta:g} contradicts match_noise {config.rollout.match_noise}, which chooses eta "
            f"{config.rollout.eta:.4g}; give one of them, or --match_noise= to match nothing"
        )
    return CommandLine(config, chosen.print_config)


def load_config(path: str | Path, **overrides) -> Config:
    """The settings of a YAML file, with some of them changed."""
    parser = _settings_parser()
    sections = parser.parse_args_into_dataclasses(args=_flags_of_file(path, parser), look_for_args_file=False)
    return Config(*sections).with_settings(**overrides).resolved()


class _Parser(BriefErrors, argparse.ArgumentParser):
    pass


def _settings_parser():
    from transformers import HfArgumentParser

    class SettingsParser(BriefErrors, HfArgumentParser):
        pass

    parser = SettingsParser(
        list(SECTIONS.values()),
        usage="%(prog)s --config FILE.yaml [--setting value ...]",
        description="Post-trains a video flow model by SAGE-GRPO. --config FILE.yaml sets a run, flags override it; "
        "--print_config shows the resolved settings and the arithmetic of the run.",
        allow_abbrev=False,
    )
    return parser


def _flags_of_file(path: str | Path, parser: argparse.ArgumentParser) -> list[str]:
    types = {f.name: f.type for cls in SECTIONS.values() for f in dataclasses.fields(cls)}
    try:
        return flags_of_file(Path(path), types)
    except ValueError as error:
        parser.error(str(error))
