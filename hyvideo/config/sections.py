"""Every setting: name, default, one sentence and its traits, once, by section.

Flags keep the names and the meaning of the public reference implementation.
"""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config import unused as no
from hyvideo.config.setting import Switch, layout, learning, machine, records, start
from hyvideo.schedulers.transitions import SAMPLERS


@dataclass(frozen=True)
class ModelSettings:
    """The model, its precision, and where it computes."""

    pretrained_model_root: str = machine("./ckpts", "Folder of the checkpoints, in either layout.")
    transformer_version: str = learning("480p_t2v", "Which transformer under <root>/transformer.", measured=True)
    dtype: Literal["bf16", "fp32"] = learning("bf16", "Precision in which the transformer computes.", measured=True)
    master_weight_type: Literal["fp32", "bf16"] = learning(
        "fp32", "Precision of the weights in training and of the optimizer's state; frozen weights have that of dtype."
    )
    encoder_dtype: Literal["fp16", "bf16", "fp32"] = learning("fp16", "Precision of the encoders.", measured=True)
    vae_dtype: Literal["fp16", "bf16", "fp32"] = learning("fp16", "Precision of the decoder.", measured=True)
    vae_tile_size: int = machine(256, "Pixels on a side of a tile to decode; 0 decodes videos whole.", measured=True)
    vae_tile_overlap: float = machine(0.125, "Part of a tile that neighbours share.", no.TILES, below=1, measured=True)
    precompute_conditions: bool = machine(False, "Encode all prompts first, then free the encoders.")
    conditions_dir: str = machine("", "Folder of encoded prompts; with precompute_conditions <output_dir>/conditions.")
    random_weights: bool = learning(False, "Draw weights at random, for smoke tests.", measured=True)
    device: Literal["auto", "cuda", "cpu"] = machine("auto", "Device to compute on; auto takes a GPU if there is one.")
    num_threads: int = machine(0, "CPU threads of a process; 0 leaves the choice to torch.")


@dataclass(frozen=True)
class DataSettings:
    """Prompts, and the size of the videos."""

    prompts_csv: list[str] = learning(["assets/prompts/train.csv"], "Prompts in CSV files: `prompt`, `ref_image_path`.")
    valid_video_csv: list[str] = records([], "CSV files of validation prompts, of the same kind; none by default.")
    negative_prompt: str = learning("", "Negative prompt, also in validation.", no.GUIDANCE, measured=True)
    height: int = learning(352, "Height of a rollout in pixels.", at_least=1, measured=True)
    width: int = learning(624, "Width of a rollout in pixels.", at_least=1, measured=True)
    sample_n_frames: int = learning(81, "Frames of a rollout; 4n + 1.", at_least=1, measured=True)
    fps: float = learning(24.0, "Frames per second, for files and the reward.", at_least=0.01, measured=True)
    seed: int = learning(42, "Seed of the run; every random number is derived from it.")


@dataclass(frozen=True)
class RolloutSettings:
    """Rollouts: how many, and the sampler."""

    batch_size: int = layout(2, "Rollouts of a data-parallel replica in one batch.", at_least=1)
    num_generations: int = learning(4, "Group size: rollouts of one prompt.", at_least=1)
    gradient_accumulation_steps: int = layout(1, "Batches of rollouts that an iteration trains on.", at_least=1)
    sde_type: str = learning("sage_grpo", "Sampler: a name of docs/sde.md, or FILE.py:NAME.", choices=SAMPLERS)
    eta: float = learning(0.5, "Exploration scale of the sampler.", at_most=1000)
    match_noise: str = learning("", "Choose eta to add as much noise as `SAMPLER:ETA`, or `recommended`: its paper's.")
    grpo_sampling_steps: int = learning(20, "Denoising steps of a rollout.", at_least=1)
    shift: float | None = learning(None, "Shift of the schedule; else the version's.", at_least=0.001, measured=True)
    cfg_scale: float | None = learning(
        None, "Guidance scale; up to 1 has one branch. By default the version's.", at_least=None, measured=True
    )
    guidance_interval: str = learning("", "Noise levels LOW:HIGH to guide; all by default.", no.GUIDANCE, measured=True)
    batched_forward: Switch = machine("auto", "Samples and branches share a forward pass; auto: not on a GPU.")
    sde_window: str = learning("", "Stochastic steps: fixed:START:LENGTH, random:LENGTH, sliding:LENGTH[:STRIDE].")
    last_step: Literal["stochastic", "deterministic"] = learning(
        "stochastic", "Whether the last step leaves its noise in the video, or takes the mean and is not trained."
    )
    use_same_noise: bool = learning(False, "Rollouts of a group share their initial noise and steps before a window.")
    decode_batch_size: int = machine(1, "Videos that the VAE decodes together.", at_least=1)


@dataclass(frozen=True)
class RewardSettings:
    """Scorers, their weights, and the advantages."""

    reward_model: list[str] = learning(["videoalign"], "Scorers, by name or FILE.py:CLASS.", no.SCORERS, measured=True)
    reward_weights: str = learning(
        "alignment",
        "Weights of the dimensions: `averaged` or A (VQ, MQ, TA 1, 1, 1), `alignment` or B (0.5, 0.5, 1), or JSON.",
        measured=True,
    )
    reward_config: str = learning("", "Options by scorer, `videoalign: {batch_size: 8}`: YAML file, JSON.", no.SCORERS)
    reward_checkpoint_mode: Literal["auto", "v1", "v2", "v3"] = learning(
        "auto", "VideoAlign's tensor names: v1, v3 released, v2 newer transformers.", *no.VIDEOALIGN, measured=True
    )
    reward_precision: Literal["bf16", "fp32_math"] = learning(
        "bf16", "bf16 as published, or float32, which tells close scores apart.", *no.VIDEOALIGN, measured=True
    )
    reward_video: Literal["memory", "file"] = learning(
        "memory", "Score decoded frames, or what an H.264 file keeps of them, as was published.", measured=True
    )
    reward_offload: bool = machine(False, "Keep idle scorers on the CPU.", no.SCORERS)
    reward_retries: int = machine(1, "Retries of a failed batch before its videos are scored one by one.")
    check_reward: bool = machine(True, "Try the scorers on one clip before the run begins.")
    max_missing_fraction: float = machine(0.25, "Most missing rewards, as a fraction; more stop the run.", at_most=1)
    remote_reward_url: str = machine("", "Reward services by address, with commas, in place of scorers.", measured=True)
    remote_reward_timeout: float = machine(120.0, "Seconds after which a service has failed.", no.SERVICE, above=0)
    advantage_clip: float = learning(5.0, "Advantages are clipped to plus or minus this.", no.CLIP, above=0)


@dataclass(frozen=True)
class LossSettings:
    """The loss and the steps, or levels, that it trains."""

    objective: Literal["grpo", "nft"] = learning(
        "grpo", "Loss: grpo clips the ratios of transitions; nft (DiffusionNFT) contrasts velocities at noisy rollouts."
    )
    nft_levels: int = learning(4, "Noise levels at which nft trains each rollout.", no.NFT, at_least=1)
    clip_range: float = learning(1e-4, "Ratios are clipped to 1 plus or minus this.", no.RATIO, above=0)
    use_grad_balancing: bool = learning(True, "Weight the steps by the temporal gradient equalizer.", no.RATIO)
    enable_timestep_permutation: bool = learning(True, "Visit a rollout's steps in random order.", no.RATIO)
    timestep_fraction: float = learning(
        1.0, "Fraction of the stochastic steps to train; unpermuted, the noisiest.", no.RATIO, above=0, at_most=1
    )
    num_updates_per_rollout: int = learning(1, "Optimizer updates per iteration, each on whole groups.", at_least=1)
    mini_batch_size_per_update: int = machine(1, "Rollouts in one training forward.", no.APART, at_least=1)
    gate_interval: int = machine(1, "Iterations between checks that fresh rollouts have a ratio of 1; 0 never checks.")
    gate_tolerance: float | None = machine(
        None, "Largest log-ratio allowed; by default 1e-6, or clip_range in bf16 for other shapes.", no.CHECK, above=0
    )


@dataclass(frozen=True)
class TrustRegionSettings:
    """Distances that hold the policy, and their coefficient."""

    kl_strategy: Literal["flags", "none", "fixed", "stepwise", "moving", "dual_moving", "dual_fixed"] = learning(
        "flags", "KL terms of the trust region; `flags` derives them from kl_weight, use_moving_KL and use_dual_kl."
    )
    use_moving_KL: bool = learning(True, "The anchor (reference model) follows the policy.", no.FLAGS)
    use_dual_kl: bool = learning(True, "Hold both position (anchor) and velocity (last policy).", no.FLAGS)
    update_ref_model_step: int = learning(
        10, "Optimizer updates between two refreshes of a moving anchor.", no.MOVING_ANCHOR, no.REFRESH, at_least=1
    )
    dual_kl_moving_weight: float = learning(1.0, "Weight of the position distance in dual strategies.", no.DUAL)
    dual_kl_step_weight: float = learning(0.1, "Weight of the velocity distance in dual strategies.", no.DUAL)
    kl_velocity: Literal["log_ratio", "gaussian"] = learning(
        "log_ratio", "Velocity distance: mean log-ratio of actions, or closed form of the means.", no.VELOCITY, no.RATIO
    )
    kl_weight: float = learning(1e-5, "Largest coefficient of the KL term; 0 turns it off.")
    kl_coef: float = learning(1e-7, "Coefficient at the start.", no.KL, no.RISE)
    kl_min_coef: float = learning(1e-7, "Smallest coefficient.", no.KL, no.ADAPTATION)
    kl_schedule: Literal["constant", "two_stage", "adaptive"] = learning("adaptive", "Rule of the coefficient.", no.KL)
    kl_feedback: Literal["paper", "lagrangian"] = learning(
        "paper", "A KL above the target lowers the coefficient (paper) or raises it (lagrangian).", *no.FEEDBACK
    )
    kl_warmup_updates: int = learning(100, "Updates over which the coefficient rises to kl_weight.", no.KL, no.RISE)
    kl_window: int = learning(10, "Updates whose KL the feedback averages.", *no.FEEDBACK, at_least=1)
    kl_gain: float = learning(0.1, "Strength of the feedback.", *no.FEEDBACK)
    kl_target: float | None = learning(None, "KL to aim at; kl_weight by default.", *no.FEEDBACK, above=0)
    anchor_fraction: float = learning(1.0, "Part of steps whose anchor KL is measured.", no.ANCHOR, above=0, at_most=1)
    kl_compute_mode: Literal["rollout_phase", "training_phase"] = machine(
        "rollout_phase", "Compute the anchor's means once after the rollout, or step by step in the update.", no.ANCHOR
    )
    reference_mode_offload: bool = machine(False, "Keep anchor and average on the CPU while not used.", no.COPIES)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, the average, and the LoRA."""

    max_steps: int = machine(10000, "Iterations: rounds of rollouts and their training.", at_least=1)
    learning_rate: float = learning(1e-5, "Learning rate.", above=0)
    weight_decay: float = learning(0.01, "Decoupled weight decay.")
    adam_beta1: float = learning(0.9, "AdamW's decay of the mean.", below=1)
    adam_beta2: float = learning(0.999, "AdamW's decay of the variance.", below=1)
    adam_epsilon: float = learning(1e-8, "AdamW's epsilon.", above=0)
    max_grad_norm: float = learning(1.0, "Gradients are clipped to this global norm.", above=0)
    max_bad_updates: int = machine(3, "Consecutive updates with NaN or inf that end the run.", at_least=1)
    warmup_steps: int = learning(0, "Updates over which the learning rate rises to its value.")
    use_muon: bool = learning(True, "Muon for matrices and AdamW for the rest; false is AdamW for all.", no.MATRICES)
    muon_momentum: float = learning(0.95, "Muon's decay of the momentum.", no.MUON, no.MATRICES, below=1)
    muon_scope: Literal["hidden", "all"] = learning("hidden", "Muon for the blocks' matrices, or for all.", no.MUON)
    use_8bit_adam: bool = learning(False, "Keep AdamW's state in 8 bits; needs torchao.")
    ema_decay: float = learning(0.0, "Decay per update of the averaged weights; 0: no average.", no.AVERAGE, below=1)
    lora_rank: int = learning(0, "Train a LoRA of this rank and freeze the rest; 0 trains all weights.")
    lora_alpha: float = learning(0.0, "The LoRA is scaled by alpha / rank; 0 stands for the rank.", no.LORA)
    pretrained_lora_path: str = learning("", "LoRA to start from: trained or, with lora_rank 0, merged into the base.")
    lora_target_modules: list[str] = learning(
        [], "Modules that get a LoRA: regular expressions of names or of their ends; by default the blocks' matrices."
    )


@dataclass(frozen=True)
class DistributedSettings:
    """Processes, sharding, recomputation and compilation."""

    sp_size: int = machine(1, "Ranks that share one video by sequence parallelism.", at_least=1)
    dp_replicate: int = machine(1, "Copies of the sharded model; 1 shards over all ranks.", at_least=1)
    enable_fsdp: bool = machine(False, "Shard parameters, gradients and optimizer state over ranks.", no.OTHER_PROCESS)
    reshard_after_forward: bool = machine(True, "Free gathered weights after a pass; false keeps them.", no.SHARDING)
    gradient_sync: Literal["auto", "every", "last"] = machine(
        "auto", "Reduce gradients in every backward pass, or in an update's last; auto: last for LoRA.", no.SHARDING
    )
    enable_gradient_checkpointing: bool = machine(False, "Recompute activations in the backward pass.")
    activation_checkpointing: Literal["auto", "full", "selective"] = machine(
        "auto", "What to recompute: blocks, or all but attention; auto: the latter if it fits.", no.RECOMPUTATION
    )
    enable_compile: Switch = machine("auto", "Compile the blocks of the transformer; auto is true on a GPU.")
    compile_backend: str = machine("inductor", "Backend of torch.compile; aot_eager finds breaks fast.", no.COMPILE)
    deterministic: bool = machine(False, "Use only deterministic kernels on a GPU; slower.")
    collective_timeout: float = machine(1800.0, "Seconds until a silent rank ends the run.", no.OTHER_PROCESS, above=0)
    watchdog_seconds: float = machine(900.0, "Seconds in one stage until all stages and the stack are shown; 0 never.")

    @property
    def reward_deadline(self) -> float:
        """Seconds that ranks wait for the rewards of a round: what is late must not look like a rank that is gone."""
        return 0.8 * self.collective_timeout


@dataclass(frozen=True)
class RecordSettings:
    """Records of a run: metrics, videos, checkpoints, validations."""

    output_dir: str = records("./outputs", "Folder of metrics, videos and checkpoints.")
    report_to: list[str] = records(["tensorboard"], "Besides metrics.jsonl: tensorboard, wandb, both or none.")
    report: bool = records(True, "Write report.html, the run as a page, at every validation and at the end.")
    save_interval: int = records(50, "Iterations between checkpoints; the last iteration is always saved.", at_least=1)
    save_minutes: float = records(0.0, "Minutes after which the end of an iteration saves too; 0: never.")
    save_total_limit: int = records(3, "Checkpoints to keep; 0 keeps all.")
    keep_every: int = records(0, "Interval of checkpoints that save_total_limit does not delete; 0: none.", no.LIMIT)
    save_asynchronously: bool = records(True, "Write checkpoints in the background, from a copy on the CPU.")
    resume_from_checkpoint: str = start("", "Checkpoint folder, or `latest` (`auto`), the newest whole one.")
    allow_changed_settings: bool = start(False, "Resume a run although settings of its method have changed.")
    log_video_interval: int = records(10, "Iterations between those whose videos are kept; 0 keeps none.")
    log_num_videos: int = records(4, "Videos to keep of an iteration or validation.", no.VIDEOS)
    validation_interval: int = records(50, "Iterations between validations.", no.VALIDATION, at_least=1)
    validation_steps: int = records(40, "ODE steps of a validation video.", no.VALIDATION, at_least=1, measured=True)
    validation_seed: int = records(930, "Seed of the validation noise, always the same.", no.VALIDATION, measured=True)
    validation_repeats: int = records(1, "Videos per validation prompt.", no.VALIDATION, at_least=1, measured=True)
    validation_batch_size: int = records(1, "Videos sampled together in a validation.", no.VALIDATION, at_least=1)
    validation_num_frames: int = records(0, "Frames of a validation video, 4n + 1; 0 is a rollout's.", no.VALIDATION)
    validation_shift: float | None = records(None, "Shift in validation; default: rollouts'.", no.VALIDATION, above=0)
    validation_cfg_scale: float | None = records(
        None, "Guidance scale in validation; that of the rollouts by default.", no.VALIDATION, at_least=None
    )
    validate_at_step0: bool = records(True, "Validate the base policy too, to compare with.", no.VALIDATION)
    validation_height: int = records(0, "Height of a validation video; 0 is a rollout's.", no.VALIDATION)
    validation_width: int = records(0, "Width of a validation video; 0 is a rollout's.", no.VALIDATION)
    on_reward_hacking: Literal["warn", "stop"] = records(
        "warn", "Where validation shows more reward and worse held-out measures: warn, or save and stop.", no.FEW_VIDEOS
    )
    hacking_threshold: float = records(1.5, "Base deviations that a held-out mean may move.", no.VALIDATION, above=0)
