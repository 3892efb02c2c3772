"""Settings, policy and options of the videos of a call. Imports no torch."""

from dataclasses import asdict, dataclass

from hyvideo.files.digests import digest_file
from hyvideo.generation.generation import Source
from hyvideo.generation.step_caching import StepCaching
from hyvideo.generation.videos import Video
from hyvideo.models.placement import Offloading
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import ODE, Sampling


@dataclass(frozen=True)
class GenerationSettings:
    """Settings, policy and options that the videos of a call are made with."""

    config: Config  # of the model
    sampling: Sampling  # the size is that of each video
    source: Source  # the policy
    seed: int  # of requests without one
    offloading: Offloading | None = None  # None: the memory of the GPU decides
    initial_noise: str = "default"  # or "reference", or "validation"
    num_videos: int = 1  # of each prompt
    sp_size: int = 1  # processes of torchrun that share each video
    caching: StepCaching | None = None
    sr: bool = False  # super-resolution
    save_pre_sr_video: bool = False
    keep_latents: bool = False
    best_of: int = 1  # candidates of each video

    def record_of(self, video: Video) -> dict:
        """Return what the JSON file of a video has of the settings: everything needed to reproduce
        the video.
        """
        return (
            self._record_of_prompt(video)
            | self._record_of_policy()
            | self._record_of_sampling(video)
        )

    def _record_of_prompt(self, video: Video) -> dict:
        request = video.request
        return {
            "prompt": request.prompt,
            "original_prompt": request.original_prompt,
            "image": request.image,
            "image_hash": digest_file(request.image) if request.image else None,
            "last_image": request.last_image,
            "last_image_hash": digest_file(request.last_image) if request.last_image else None,
            "seed": request.seed_or(self.seed),
            "number": video.number,
        }

    def _record_of_policy(self) -> dict:
        model = self.config.model
        source = self.source
        return {
            "model": model.pretrained_model_root,
            "version": model.transformer_version,
            "expert": model.trained_expert,
            "base_lora": model.base_lora_path or None,
            "low_noise_base_lora": model.low_noise_base_lora_path or None,
            "checkpoint": str(source.checkpoint) if source.checkpoint else None,
            "lora": str(source.lora) if source.lora else None,
            "lora_scale": source.lora_scale if source.lora else None,
            "policy_hash": source.policy_hash,
            "dtype": model.dtype,
            "base_weight_dtype": model.base_weight_dtype,
            "partner_weight_dtype": model.partner_weight_dtype,
            "vae_dtype": model.vae_dtype,
            "use_sageattn": model.attention_kernel == "sage",
            "enable_torch_compile": self.config.distributed.enable_compile == "true",
        }

    def _record_of_sampling(self, video: Video) -> dict:
        sampling = self.sampling
        is_stochastic = sampling.sampler != ODE
        has_experts = sampling.boundary is not None
        return {
            "steps": sampling.steps,
            "shift": sampling.shift,
            "sigmas": sampling.sigmas,
            "guidance_scale": sampling.guidance_scale,
            "low_noise_guidance_scale": sampling.low_noise_guidance_scale if has_experts else None,
            "guidance_interval": sampling.guidance_interval,
            "negative_prompt": sampling.negative_prompt if sampling.is_guided else None,
            "sde_type": sampling.sampler if is_stochastic else None,
            "eta": sampling.eta if is_stochastic else 0.0,
            "frames": sampling.frames,
            "height": video.height,
            "width": video.width,
            "fps": sampling.fps,
            "initial_noise": self.initial_noise,
            "step_caching": asdict(self.caching) if self.caching else None,
        }
