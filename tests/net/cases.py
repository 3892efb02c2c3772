"""The runs that two commits are compared by: every shipped run of the miniature, made small, and
what two ranks add.

A case is flags of post_train.py only, since each commit is started through its own program.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ITERATIONS = 3


@dataclass(frozen=True)
class Case:
    config: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    stops_after: tuple[int, ...] = ()  # iterations after which the run ends and is resumed


def flags(**settings: object) -> tuple[str, ...]:
    return tuple(word for name, value in settings.items() for word in (f"--{name}", str(value)))


ALL = flags(
    num_threads=1,
    seed=3,
    report_to="none",
    log_num_videos=2,
    save_interval=1,
    validation_interval=2,
    validation_steps=3,
    resume_from_checkpoint="latest",
)
SMALL = flags(
    valid_video_csv="assets/miniature/prompts/smoke.csv",
    validation_repeats=1,
    validation_batch_size=8,
    log_video_interval=2,
    warmup_steps=2,
    height=16,
    width=16,
)
GROUPS = flags(
    batch_size=8, num_generations=4, mini_batch_size_per_update=4, num_updates_per_rollout=2
)
REFRESHED = flags(kl_warmup_updates=2, update_ref_model_step=4)

RUNS_OF_THE_MINIATURE = {
    "miniature": SMALL + GROUPS + REFRESHED,
    "miniature_dpo": SMALL + flags(batch_size=4, mini_batch_size_per_update=2, sample_n_frames=5),
    "miniature_draft": SMALL + flags(batch_size=4, mini_batch_size_per_update=4),
    "miniature_guidance": SMALL + GROUPS,
    "miniature_i2v": SMALL
    + GROUPS
    + REFRESHED
    + flags(
        valid_video_csv="assets/miniature_wan_ti2v/prompts/valid.csv", validation_batch_size=48
    ),
    "miniature_nft": SMALL + GROUPS + REFRESHED,
    "miniature_paper": SMALL + GROUPS + REFRESHED,
    "miniature_student": SMALL + flags(batch_size=4, mini_batch_size_per_update=2),
    "miniature_wan": SMALL + GROUPS + REFRESHED,
    "smoke": (),
}


def two_ranks(*more: str, **settings: object) -> Case:
    return Case("smoke", flags(batch_size=4, learning_rate=1e-3, **settings) + more, ranks=2)


def cases(pairs: Path) -> dict[str, Case]:
    """Return all cases by name. ``pairs`` is the CSV file of rated pairs for objective dpo."""
    found = {
        path.stem: Case(path.stem, RUNS_OF_THE_MINIATURE.get(path.stem, SMALL))
        for path in sorted([*ROOT.glob("configs/miniature*.yaml"), ROOT / "configs/smoke.yaml"])
    }
    found["miniature_dpo"] = Case(
        "miniature_dpo", RUNS_OF_THE_MINIATURE["miniature_dpo"] + flags(pairs_csv=pairs)
    )
    reward = f"{Path(__file__).with_name('reward.py')}:Red"
    found |= {
        "fsdp": two_ranks(enable_fsdp=True),
        "sequence parallel": two_ranks(
            sp_size=2, num_updates_per_rollout=1, enable_gradient_checkpointing=True
        ),
        "kept gathered": two_ranks(enable_fsdp=True, reshard_after_forward=False),
        "lora with ema": two_ranks(lora_rank=3, lora_alpha=3, ema_decay=0.5, enable_fsdp=True),
        "guidance interval": two_ranks(
            guidance_interval="0.6:0.95", batched_forward=False, kl_strategy="dual_fixed"
        ),
        "missing reward": two_ranks(
            max_missing_fraction=1.0, reward_model=reward, reward_weights='{"red": 1}'
        ),
    }
    resumed = two_ranks(enable_fsdp=True, ema_decay=0.5, objective="nft", eta=0, nft_levels=2)
    found["resume"] = Case(resumed.config, resumed.flags, resumed.ranks, stops_after=(1, 2))
    return found
