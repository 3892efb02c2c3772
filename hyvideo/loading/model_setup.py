"""Loading and checking of the models of a run, for training, generation and scripts."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hyvideo.checks.layout import head_problems
from hyvideo.checks.machine_rules import image_problems
from hyvideo.data.prompts import Request
from hyvideo.distributed.collectives import barrier
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.files.digests import digest_of, digest_weights
from hyvideo.files.text import nearest
from hyvideo.loading import fit_checks
from hyvideo.loading.gpu_driver import driver_problem
from hyvideo.loading.saved_policy import read_saved_lora
from hyvideo.models import loading
from hyvideo.models.attention_kernels import Choice, Shape, choose_kernel
from hyvideo.models.conditions import Condition
from hyvideo.models.decoding import Tiling, set_tiling
from hyvideo.models.family import prepare
from hyvideo.models.fp8 import use_fp8
from hyvideo.models.guidance import OTHER_EXPERT, Expert
from hyvideo.models.lora import Lora, fit_lora, training_config
from hyvideo.models.offload import loaded_on, put
from hyvideo.models.placement import ON_DEVICE, Placement, Placements
from hyvideo.models.sizes import read_architecture
from hyvideo.models.versions import RELEASED, UNSUPPORTED, experts_of, version_defaults
from hyvideo.pipelines.condition_encoder import ConditionEncoder, PartStore
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline, Partner, SamplerSettings
from hyvideo.settings.config import Config
from hyvideo.settings.problems import problem_of
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import ModelSettings, OptimizerSettings

if TYPE_CHECKING:
    from peft import LoraConfig

RANDOM_WEIGHTS_SEED = 0


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of this process; ``auto`` prefers a GPU.

    Raises ValueError for an unusable GPU.
    """
    if name != "cpu" and (problem := driver_problem()):
        raise ValueError(problem)
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device cuda needs a GPU that torch can use, and none was found; set device auto or cpu"
        )
    use_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    if use_gpu and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"each process needs a separate GPU: got {torch.cuda.device_count()} GPUs for process "
            f"{local_rank + 1} of this machine. Start one process per GPU, or set device cpu"
        )
    return torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")


def make_deterministic() -> None:
    """Restrict torch to deterministic kernels (docs/reliability.md#determinism); call before
    anything runs on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
    torch.use_deterministic_algorithms(True)  # also covers attention's backward pass and inductor
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def load_encoder(
    config: Config, device: torch.device, placements: Placements | None = None
) -> tuple[ConditionEncoder, nn.Module]:
    """Return the condition encoder of a run, which loads its models lazily, and the VAE, by default
    where the training has them.
    """
    placements = placements or config.placements
    model = config.model
    root = Path(model.pretrained_model_root)
    folder = loading.transformer_folder(root, model.transformer_version)
    family = loading.read_family(folder)
    transformer, _ = loading.read_arguments(loading.read_transformer(folder), folder)
    seed = weights_seed(model)
    vae = loading.load_vae(
        root, dtype=DTYPES[model.vae_dtype], device=device, random_weights_seed=seed
    )
    set_tiling(vae, Tiling(model.vae_tile_size, model.vae_tile_overlap))
    put(vae.requires_grad_(False), placements.vae, device)
    # fp16 encoders of the original have rotary frequencies in fp16, too
    rotary_dtype = torch.float32
    is_rounded = (
        family.rounds_rotary and not version_defaults(model.transformer_version).float32_rotary
    )
    if model.encoder_dtype == "fp16" and is_rounded:
        rotary_dtype = torch.float16
    default_folder = (
        Path(config.record.output_dir) / "conditions" if model.precompute_conditions else ""
    )
    store = model.conditions_dir or default_folder
    encoder = ConditionEncoder(
        family.parts,
        lambda part: part.load(
            root,
            transformer=transformer,
            vae=vae,
            dtype=DTYPES[model.encoder_dtype],
            placement=placements.encoders,
            rotary_dtype=rotary_dtype,
            device=device,
            random_weights_seed=seed,
        ),
        dtype=DTYPES[model.dtype],
        identity=digest_of(
            digest_weights([root / name for name in family.folders]),
            model.encoder_dtype,
            model.vae_dtype,
            model.random_weights,
            str(rotary_dtype),
        ),
        store=PartStore(store) if store else None,
    )
    return encoder, vae


def load_pipeline(
    config: Config,
    device: torch.device,
    *,
    encoder: ConditionEncoder,
    vae: nn.Module,
    kinds: frozenset[str],
    placements: Placements = ON_DEVICE,
    weights_dtype: torch.dtype = torch.float32,
    is_overwritten: bool = False,
    sampling: Sampling | None = None,
) -> GRPOPipeline:
    """Load a transformer in one process and return its sampling pipeline, which computes in
    ``config.model.dtype``. `place_transformers` moves the transformers when the caller has changed
    them.

    Args:
        kinds: Kinds of conditions used in training; parameters that none of them use are frozen.
        placements: Decide where the weights are loaded to.
        weights_dtype: Dtype of the weights; for sampling, ``config.model.dtype`` is sufficient.
        is_overwritten: The caller sets every weight, so the base model (33 GB) is not read, and
            the weights are not stored in fp8 yet.
        sampling: How videos are sampled, if not as rollouts.
    """
    choose_attention(config.model, device, with_gradient=False)
    requests = sampling.negative_requests if sampling else config.negative_requests
    negative = negative_condition(requests, encoder, device)
    own = config.trained_expert

    def load(expert: Expert | None, weight_dtype: str, placement: Placement) -> nn.Module:
        return loaded_transformer(
            config.model,
            expert,
            kinds,
            dtype=weights_dtype,
            device=device,
            kept_on=loaded_on(placement, device),
            weight_dtype=weight_dtype,
        )

    if is_overwritten:
        transformer = empty_transformer(
            config.model,
            own,
            kinds,
            dtype=weights_dtype,
            device=loaded_on(placements.policy, device),
        )
    else:
        transformer = load(own, config.model.base_weight_dtype, placements.policy)
    partner = None
    if own is not None:
        other = OTHER_EXPERT[own]
        second = load(other, config.model.partner_weight_dtype, placements.partner)
        partner = Partner(second, other, config.version.boundary)
    config = config.resolve_auto(on_gpu=device.type == "cuda")
    return make_pipeline(
        sampling or config.sampling,
        config.model.dtype,
        transformer,
        vae,
        negative,
        is_batched=config.rollout.batched_forward == "true",
        partner=partner,
    )


def loaded_transformer(
    model: ModelSettings,
    expert: Expert | None,
    kinds: frozenset[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept_on: torch.device,
    weight_dtype: str,
) -> nn.Module:
    """Return the transformer of an expert, or a single one, in one process, on ``kept_on``; see
    `stream_expert`.
    """
    transformer, weights = stream_expert(
        model, expert, kinds, dtype=dtype, device=device, weight_dtype=weight_dtype
    )
    fill_shards(transformer, weights, device=device, kept_on=kept_on, is_alone=True)
    return transformer


def place_transformers(
    pipeline: GRPOPipeline, placements: Placements, device: torch.device
) -> None:
    """Place the transformers of a pipeline that only samples, once they have their adapters and are
    compiled.
    """
    put(pipeline.transformer.requires_grad_(False), placements.policy, device)
    if pipeline.partner:
        put(pipeline.partner.transformer.requires_grad_(False), placements.partner, device)


def stream_expert(
    model: ModelSettings,
    expert: Expert | None,
    kinds: frozenset[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    weight_dtype: str,
    read: bool = True,
    loras: Iterable[Lora] = (),
) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """Return the transformer of an expert, or a single one, without weights and in eval mode, and its
    weights for `fill_shards`, with its base LoRAs. Training and sampling load all experts by it.

    Args:
        kinds: Kinds of conditions; parameters that none of them use are frozen.
        weight_dtype: How the matrices of the blocks are stored: in ``dtype``, or frozen in ``fp8``.
        read: False for a rank that receives the weights from the first one.
        loras: Further LoRAs that are merged.
    """
    transformer, weights = loading.stream_transformer(
        model.pretrained_model_root,
        model.transformer_version,
        expert=expert,
        read=read,
        device=device,
        random_weights_seed=weights_seed(model, expert),
        loras=[*base_loras(model, expert), *loras],
    )
    transformer.type(dtype)
    prepare(transformer, kinds)
    if weight_dtype == "fp8":
        use_fp8(transformer)
    return transformer, weights


def empty_transformer(
    model: ModelSettings,
    expert: Expert | None,
    kinds: frozenset[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Return the transformer with memory for its weights in ``dtype``, which the caller sets; it may
    store them in fp8 afterwards (`fp8.store_all`).
    """
    root, version = model.pretrained_model_root, model.transformer_version
    empty = loading.transformer_on_meta(root, version, expert)
    transformer = empty.type(dtype).to_empty(device=device)
    prepare(transformer.eval(), kinds)
    return transformer


def negative_condition(
    requests: list[Request], encoder: ConditionEncoder, device: torch.device
) -> Condition | None:
    """Encode the negative prompt of ``Config.negative_requests``; None without guidance."""
    samples = encoder(requests).to(device).samples
    return samples[0] if samples else None


def read_initial_lora(model: ModelSettings, optimizer: OptimizerSettings) -> Lora | None:
    """Return the LoRA that a run starts from, or None; with lora_rank 0 the caller merges it into
    the weights.
    """
    if not optimizer.pretrained_lora_path:
        return None
    return read_saved_lora(
        Path(optimizer.pretrained_lora_path),
        model.trained_expert,
        ignore_expert=model.ignore_lora_expert,
    )


def adapter_config(
    transformer: nn.Module, optimizer: OptimizerSettings, start: Lora | None
) -> "LoraConfig":
    """Return peft's settings for the adapter of a run.

    Raises ValueError if they do not fit the transformer.
    """
    rank, targets = optimizer.lora_rank, optimizer.lora_target_modules
    alpha = optimizer.lora_alpha or 2.0 * rank
    return training_config(transformer, rank=rank, alpha=alpha, targets=targets, start=start)


def check_adapter(model: ModelSettings, optimizer: OptimizerSettings) -> None:
    """Raise ValueError if the adapter or the initial LoRA does not fit the transformer.

    Reads no weights.
    """
    for expert in experts_of(model.transformer_version):
        base_loras(model, expert)
    start = read_initial_lora(model, optimizer)
    if start or optimizer.lora_rank:
        empty = loading.transformer_on_meta(
            model.pretrained_model_root, model.transformer_version, model.trained_expert
        )
        fit_lora(empty, start or {})
        if optimizer.lora_rank:
            adapter_config(empty, optimizer, start)


def make_pipeline(
    sampling: Sampling,
    dtype: str,
    transformer: nn.Module,
    vae: nn.Module,
    negative: Condition | None,
    *,
    is_batched: bool,  # samples and guidance branches share a forward pass
    partner: Partner | None = None,
) -> GRPOPipeline:
    """Return the sampling pipeline of a transformer."""
    return GRPOPipeline(
        transformer,
        vae,
        sampling=SamplerSettings(sampling.guidance, is_batched),
        negative=negative,
        compute_dtype=DTYPES[dtype],
        partner=partner,
    )


def choose_attention(
    model: ModelSettings,
    device: torch.device,
    *,
    tokens: int = Shape().tokens,
    sp_size: int = 1,
    **options,
) -> Choice:
    """Choose the attention kernel of this process for one rank's heads; see `choose_kernel` for
    ``options``.
    """
    sizes = read_architecture(model.pretrained_model_root, model.transformer_version)
    heads = max(1, sizes.num_attention_heads // sp_size)
    shape = Shape(heads, sizes.attention_head_dim, tokens, DTYPES[model.dtype])
    return choose_kernel(model.attention_kernel, shape, device, **options)


def weights_seed(model: ModelSettings, expert: Expert | None = None) -> int | None:
    """Return the seed of random weights, which differ between two experts; None if weights are read
    from files.
    """
    if not model.random_weights:
        return None
    return RANDOM_WEIGHTS_SEED + (expert == "low")


def base_loras(model: ModelSettings, expert: Expert | None) -> list[Lora]:
    """Return the LoRAs that are merged into the weights of an expert, or of a single transformer."""
    setting = "low_noise_base_lora_path" if expert == "low" else "base_lora_path"
    path = getattr(model, setting)
    if not path:
        return []
    lora = read_saved_lora(
        Path(path), expert, setting=setting, ignore_expert=model.ignore_lora_expert
    )
    # `with_lora` ignores names that the model does not have
    root, version = model.pretrained_model_root, model.transformer_version
    fit_lora(loading.transformer_on_meta(root, version, expert), lora)
    return [lora]


def try_encoders(
    encoder: ConditionEncoder, requests: Iterable[Request], size: tuple[int, int, int]
) -> None:
    """Encode the first request of each kind, so that encoders are loaded before the rollouts.

    Raises ValueError for damaged weights.
    """
    first = {}
    for request in requests:
        for part in encoder.parts:
            if part.content(request) is not None:
                first.setdefault(part.kind, request)
    encoder(list(first.values()), size)


def precompute_conditions(
    encoder: ConditionEncoder,
    requests_and_sizes: Iterable[tuple[list[Request], tuple[int, int, int]]],
    mesh: Mesh,
    *,
    on_stage: Callable[[str, str], None] = lambda stage, part: None,  # called for each prompt
) -> None:
    """Encode all requests at their (frames, height, width), split over the ranks; then unload the
    encoders.
    """
    for requests, size in requests_and_sizes:
        own = requests[mesh.rank :: mesh.world_size]
        for number, request in enumerate(own, 1):
            on_stage("conditions", f"prompt {number}/{len(own)}")
            encoder([request], size)
    encoder.release()
    barrier(mesh)
    if mesh.world_size > 1:
        encoder.expect_stored()


def check_checkpoint(
    config: Config, requests: Mapping[str, list[Request]], sizes: Iterable[tuple[int, int, int]]
) -> frozenset[str]:
    """Return the kinds of conditions that a run uses, after checking its checkpoint folder and
    images by their headers.

    ``requests`` are keyed by the setting that names their file; ``sizes`` are (frames, height,
    width).
    """
    model = config.model
    root, version = model.pretrained_model_root, model.transformer_version
    if reason := UNSUPPORTED.get(version):
        raise ValueError(f"transformer_version {version} cannot be used: {reason}")
    all_requests = [*chain(*requests.values()), *config.negative_requests]
    problems = fit_checks.check_checkpoint(
        root, version, all_requests, weights_needed=not model.random_weights
    )
    if problems:
        raise ValueError("\n".join([f"the checkpoints in {root} cannot be used:", *problems]))
    folder = loading.transformer_folder(root, version)
    family = loading.read_family(folder)
    architecture = read_architecture(root, version)
    listed = version_defaults(version).family
    if listed and family.name != listed:
        problems.append(
            f"transformer_version {version} belongs to the family {listed}, but {folder.path} "
            f"contains a transformer of {family.name}. Set transformer_version and "
            "pretrained_model_root to the same family"
        )
    if not listed and folder.path.name != version:
        # a misspelled name would silently get the default sampling settings
        known = [name for name, row in RELEASED.items() if row.family == family.name]
        if hint := nearest(version, known):
            problems.append(
                f"transformer_version {version} is not listed, and there is no folder "
                f"transformer/{version}; {hint}"
            )
    for size in dict.fromkeys(sizes):
        is_validation = size == config.validation_sampling.size != config.sampling.size
        for problem in problem_of(lambda size=size: architecture.latent_size(*size)):
            problems.append(f"{problem} for a validation video" if is_validation else problem)
    problems += head_problems(config.distributed.sp_size, architecture.num_attention_heads)
    task = loading.read_task(root, version)
    arguments, _ = loading.read_arguments(loading.read_transformer(folder, family), folder)
    given_frames = family.given_frames(arguments)
    for source, prompts in requests.items():
        name = f"transformer_version {version}"
        problems += image_problems(task, given_frames, prompts, name, source)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return family.kinds(all_requests)


def vae_weights(model: ModelSettings) -> str:
    """Return a digest of the weights of the VAE."""
    return digest_of(
        digest_weights([Path(model.pretrained_model_root) / "vae"]), model.random_weights
    )


def vae_identity(model: ModelSettings) -> str:
    """Return a digest of the VAE and of the settings on which the latents of a video depend."""
    return digest_of(
        vae_weights(model),
        model.vae_dtype,
        model.vae_tile_size,
        model.vae_tile_overlap,
    )
