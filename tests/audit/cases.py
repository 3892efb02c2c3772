"""Short runs of every miniature config, whose settings tell values apart: no two that could be
confused are equal, and none that is under test has its default.
"""

from pathlib import Path

from tests.net.cases import Case, flags

FPS = 7  # of the runs and of given videos
ALL = flags(
    record="all",
    num_threads=1,
    seed=5,
    report_to="none",
    height=16,
    width=24,
    fps=FPS,
    shift=2.5,
    learning_rate=7e-4,
    warmup_steps=4,
    max_grad_norm=0.013,
    log_video_interval=1,
    log_num_videos=5,
    save_interval=1,
    save_total_limit=0,
    validation_interval=3,
    validation_seed=77,
    validation_steps=3,
    validation_repeats=2,
    validation_batch_size=6,
    validation_height=32,
    validation_width=16,
    validation_shift=3.5,
)
FOUR_PROMPTS = flags(valid_video_csv="tests/audit/valid.csv")
# 12 rollouts: 4 groups of 3, in 2 batches and 2 updates, each of 2 passes
ROLLOUTS = flags(
    batch_size=6,
    gradient_accumulation_steps=2,
    num_generations=3,
    mini_batch_size_per_update=4,
    num_updates_per_rollout=2,
    reward_weights='{"VQ": 0.3, "TA": 1.1}',
    advantage_clip=1.3,
)
TRUST_REGION = flags(kl_warmup_updates=3, update_ref_model_step=4)
ONE_UPDATE = flags(num_updates_per_rollout=1, weight_decay=0.03, ema_decay=0.7)


# Statements that the audit cannot check, and says why: steps of AdamW without checkpoints that are one
# update apart, and forward passes without a gradient of other objectives than grpo.
UNCHECKED_STATEMENTS = {
    "grpo": 1,
    "one update": 2,
    "paper": 1,
    "nft": 2,
    "draft": 3,
    "guidance": 1,
    "student": 4,
    "experts": 1,
    "low-noise expert": 2,
    "wan": 1,
    "image to video": 1,
    "dpo": 1,
    "sft": 1,
    "two ranks": 4,
    "sequence parallel": 1,
    "missing rewards": 4,
    "resume": 1,
}


def cases(pairs: Path, videos: Path) -> dict[str, Case]:
    """Return the cases by name. ``pairs`` and ``videos`` are CSV files for objectives dpo and sft."""
    grpo = FOUR_PROMPTS + ROLLOUTS + TRUST_REGION
    images = flags(
        valid_video_csv="assets/miniature_wan_ti2v/prompts/valid.csv", validation_repeats=1
    )
    given = FOUR_PROMPTS + flags(
        batch_size=4,
        mini_batch_size_per_update=2,
        gradient_accumulation_steps=3,
        height=16,
        width=16,
        sample_n_frames=5,
    )
    return {
        "grpo": Case("miniature", grpo + flags(sde_window="random:3", grpo_sampling_steps=6)),
        "one update": Case(
            "miniature",
            grpo
            + ONE_UPDATE
            + flags(
                cfg_scale=1.7,
                validation_cfg_scale=2.3,
                sde_type="flow_grpo",
                eta="sage_grpo:0.3",
                sde_window="sliding:2:3",
                timestep_fraction=0.5,
                reward_normalization="group",
                use_same_noise="true",
                update_ref_model_step=2,
            ),
        ),
        "lora": Case(
            "miniature",
            grpo
            + ONE_UPDATE
            + flags(
                lora_rank=3,
                lora_alpha=5,
                sde_type="cps",
                eta="sage_grpo:0.6",
                ignore_rewards="true",
                kl_strategy="dual_fixed",
            ),
        ),
        "paper": Case(
            "miniature_paper", grpo + flags(reference_conventions="true", kl_warmup_updates=60)
        ),
        "nft": Case("miniature_nft", grpo + flags(nft_levels=3)),
        "draft": Case("miniature_draft", grpo + flags(num_updates_per_rollout=1)),
        "guidance": Case("miniature_guidance", grpo + flags(num_updates_per_rollout=1)),
        "student": Case(
            "miniature_student", FOUR_PROMPTS + flags(batch_size=6, mini_batch_size_per_update=4)
        ),
        "experts": Case("miniature_experts", grpo),
        "low-noise expert": Case(
            "miniature_experts", grpo + flags(expert="low", objective="nft", nft_levels=3, eta=0)
        ),
        "wan": Case("miniature_wan", grpo),
        "image to video": Case("miniature_i2v", ROLLOUTS + TRUST_REGION + images),
        "dpo": Case("miniature_dpo", given + flags(pairs_csv=pairs)),
        "sft": Case(
            "miniature_sft", given + flags(videos_csv=videos, keep_fraction=0.4, num_generations=1)
        ),
        "two ranks": Case("miniature", grpo + flags(batch_size=3, enable_fsdp="true"), ranks=2),
        "sequence parallel": Case(
            "miniature", grpo + flags(sp_size=2, activation_checkpointing="full"), ranks=2
        ),
        "missing rewards": Case(
            "smoke",
            grpo
            + flags(
                batch_size=3,
                max_missing_fraction=1,
                reward_model="tests/net/reward.py:Red",
                reward_weights='{"red": 1}',
            ),
            ranks=2,
        ),
        "resume": Case("miniature", grpo, stops_after=(1, 2)),
    }
