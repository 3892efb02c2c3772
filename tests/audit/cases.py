"""Short runs of every miniature config, whose settings tell values apart: no two that could be
confused are equal, and none that is under test has its default.
"""

from pathlib import Path

from tests.net.cases import Case, flags

FPS = 7  # of the runs and of given videos
ALL = flags(
    record="all",
    num_threads=1,
    seed=19,
    report_to="none",
    report="false",
    sample_n_frames=5,
    height=16,
    width=24,
    fps=FPS,
    shift=2.5,
    learning_rate=7e-4,
    warmup_steps=4,
    max_grad_norm=0.013,
    log_video_interval=2,
    log_num_videos=1,
    save_interval=1,
    save_total_limit=0,
    validation_interval=3,
    validation_seed=77,
    validation_steps=3,
    validation_repeats=2,
    validation_batch_size=6,
    validation_num_frames=9,
    validation_height=32,
    validation_width=16,
    validation_shift=3.5,
)
FOUR_PROMPTS = flags(valid_video_csv="tests/audit/valid.csv")
FOUR_FIRST_FRAMES = flags(valid_video_csv="tests/audit/first_frames.csv")
# 12 rollouts: 4 groups of 3, in 2 batches and 2 updates, each of 2 passes
ROLLOUTS = flags(
    batch_size=6,
    gradient_accumulation_steps=2,
    num_generations=3,
    grpo_sampling_steps=5,
    mini_batch_size_per_update=4,
    num_updates_per_rollout=2,
    reward_weights='{"VQ": 0.3, "TA": 1.1}',
    advantage_clip=1.3,
)
NOISE = flags(sde_window="fixed:1:3")
TRUST_REGION = flags(kl_warmup_updates=3, update_ref_model_step=4)
ONE_UPDATE = flags(num_updates_per_rollout=1, weight_decay=0.03, ema_decay=0.7, log_num_videos=2)
# The first two blocks of a miniature are no trained model, and the check before training refuses a
# velocity on re-noised videos that is worse than none.
UNTRAINED = flags(gate_interval=0)
REPORTED = flags(report="true", log_num_videos=5)


# Statements that the audit cannot check, and says why: steps of AdamW without checkpoints that are one
# update apart, forward passes without a gradient of other objectives than grpo, and the report of a
# run without one.
UNCHECKED_STATEMENTS = {
    "resumed": 1,
    "one update": 3,
    "lora": 1,
    "paper": 2,
    "nft": 3,
    "draft": 4,
    "guidance": 2,
    "student": 5,
    "experts": 2,
    "low-noise expert": 3,
    "wan": 2,
    "image to video": 2,
    "dpo": 1,
    "sft": 2,
    "two ranks": 5,
    "sequence parallel": 2,
    "missing rewards": 4,
}


def cases(pairs: Path, videos: Path) -> dict[str, Case]:
    """Return the cases by name. ``pairs`` and ``videos`` are CSV files for objectives dpo and sft."""
    sampled = FOUR_PROMPTS + ROLLOUTS + TRUST_REGION
    given = FOUR_PROMPTS + flags(
        batch_size=4,
        mini_batch_size_per_update=2,
        gradient_accumulation_steps=3,
        height=16,
        width=16,
    )
    return {
        "resumed": Case(
            "miniature",
            sampled + REPORTED + flags(sde_window="random:3", grpo_sampling_steps=6),
            stops_after=(1, 2),
        ),
        "one update": Case(
            "miniature",
            sampled
            + ONE_UPDATE
            + flags(
                grpo_sampling_steps=6,
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
            sampled
            + NOISE
            + ONE_UPDATE
            + flags(
                lora_rank=3,
                lora_alpha=5,
                sde_type="cps",
                eta="sage_grpo:0.4",
                ignore_rewards="true",
                kl_strategy="dual_fixed",
            ),
        ),
        "paper": Case(
            "miniature_paper", sampled + flags(reference_conventions="true", kl_warmup_updates=40)
        ),
        "nft": Case("miniature_nft", sampled + UNTRAINED + flags(nft_levels=3)),
        "draft": Case("miniature_draft", sampled + flags(num_updates_per_rollout=1)),
        "guidance": Case(
            "miniature_guidance", sampled + UNTRAINED + flags(num_updates_per_rollout=1)
        ),
        "student": Case(
            "miniature_student", FOUR_PROMPTS + flags(batch_size=6, mini_batch_size_per_update=4)
        ),
        # three of eight steps are in the noise levels of the high-noise expert
        "experts": Case("miniature_experts", sampled + flags(grpo_sampling_steps=8)),
        "low-noise expert": Case(
            "miniature_experts",
            sampled + UNTRAINED + flags(expert="low", objective="nft", nft_levels=3, eta=0),
        ),
        "wan": Case("miniature_wan", sampled + NOISE),
        "image to video": Case(
            "miniature_i2v", FOUR_FIRST_FRAMES + ROLLOUTS + TRUST_REGION + NOISE
        ),
        "dpo": Case("miniature_dpo", given + REPORTED + UNTRAINED + flags(pairs_csv=pairs)),
        "sft": Case(
            "miniature_sft",
            given + UNTRAINED + flags(videos_csv=videos, keep_fraction=0.4, num_generations=1),
        ),
        "two ranks": Case(
            "miniature",
            sampled + NOISE + flags(log_num_videos=5, batch_size=3, enable_fsdp="true"),
            ranks=2,
        ),
        "sequence parallel": Case(
            "miniature",
            sampled + NOISE + flags(log_num_videos=5, sp_size=2, activation_checkpointing="full"),
            ranks=2,
        ),
        "missing rewards": Case(
            "smoke",
            sampled
            + REPORTED
            + flags(
                batch_size=3,
                grpo_sampling_steps=4,
                max_missing_fraction=1,
                reward_model="tests/net/reward.py:Red",
                reward_weights='{"red": 1}',
            ),
            ranks=2,
        ),
    }
