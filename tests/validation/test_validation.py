"""Validation: its settings, its noise, its videos on several ranks, and the summary of a run."""

import json
import math
from pathlib import Path

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.data.prompts import read_requests
from hyvideo.distributed.mesh import Mesh
from hyvideo.report.run_summary import print_summary
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.command_line import load_config
from hyvideo.settings.identity import evaluation_settings
from hyvideo.trainer import Trainer
from hyvideo.training.preemption import Stopped
from hyvideo.validation import parts
from hyvideo.validation.validation import Validation
from tests.distributed.launch import launch
from tests.live_tensors import LiveTensors
from tests.shallow import SHALLOW
from tests.test_trainer import Redness

CPU = torch.device("cpu")


def validate(folder):
    from hyvideo.distributed import mesh as ranks
    from hyvideo.settings.command_line import load_config
    from hyvideo.trainer import Trainer
    from tests.distributed.test_same_run import ThresholdScorer

    parts.PART_BYTES = 1
    settings = {
        "log_num_videos": 5,
        "sp_size": 2,
        "batch_size": 4,
        "validation_batch_size": 1,
    }
    settings |= {"pretrained_model_root": SHALLOW}
    prompts = Path(folder) / "five.csv"
    config = load_config(
        "configs/smoke.yaml", output_dir=folder, valid_video_csv=str(prompts), **settings
    )
    trainer = Trainer(
        config, ranks.start(2, CPU, timeout=60), CPU, scorers={"test": ThresholdScorer(-9.0)}
    )
    return trainer.validation.run(0)


@pytest.mark.system
def test_several_ranks_keep_all_requested_videos(tmp_path):
    """Every batch is a part, in which a rank may have no video."""
    prompts = [
        f"a {colour} circle moves up" for colour in ("red", "blue", "green", "white", "yellow")
    ]
    (tmp_path / "five.csv").write_text("\n".join(["prompt", *prompts]) + "\n")
    results = launch("tests.validation.test_validation:validate", 4, str(tmp_path))
    assert all(result["validation/reward"] == results[0]["validation/reward"] for result in results)
    folder = tmp_path / "samples" / "000000"
    entries = json.loads((folder / "scores.json").read_text())
    assert [(entry["prompt"], entry["file"]) for entry in entries] == [
        (prompt, f"{number:03d}.mp4") for number, prompt in enumerate(prompts)
    ]
    assert all((folder / entry["file"]).is_file() for entry in entries)


VALIDATED = {"valid_video_csv": "assets/miniature/prompts/smoke.csv"}


@pytest.fixture
def in_parts(tiny_config, mesh, monkeypatch):
    """Return the validation of 16 videos in batches of 2 and parts of 4, and the count of its
    videos in memory.
    """
    settings = {
        "validation_repeats": 2,
        "validation_steps": 1,
        "validation_batch_size": 2,
        "log_num_videos": 16,
    }
    validation = Trainer(tiny_config.with_settings(**VALIDATED, **settings), mesh, CPU).validation
    live, decode = LiveTensors(), validation.pipeline.decode

    def counted(latents, **options):
        decoded = decode(latents, **options)
        live.add(decoded)
        return decoded

    monkeypatch.setattr(validation.pipeline, "decode", counted)
    monkeypatch.setattr(parts, "PART_BYTES", 4 * 3 * math.prod(validation.size))
    return validation, live


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".run"}


def test_a_validation_has_one_part_in_memory_and_the_results_of_the_whole(in_parts, monkeypatch):
    validation, live = in_parts
    metrics = validation.run(0)
    assert len(live.references) == 16 and live.most == 4
    found = contents(validation.folder(0))
    assert (
        len(found) == 16 + 3
        and {"held_out/diversity", "frechet_distance"} <= validation.measures(0).keys()
    )
    monkeypatch.setattr(parts, "PART_BYTES", 2**29)
    assert validation.run(0) == pytest.approx(metrics, nan_ok=True)
    assert live.most == 16 and contents(validation.folder(0)) == found


@pytest.mark.system
def test_a_killed_validation_leaves_no_scores_and_is_repeated_whole(in_parts):
    validation, _ = in_parts
    validation.run(0)
    whole = contents(validation.folder(0))
    calls = []

    def killed_in_the_second_part(is_ready):
        calls.append(is_ready)
        if calls.count(False) > 6:
            raise Stopped("killed")
        return is_ready

    may_end, validation.may_end = validation.may_end, killed_in_the_second_part
    with pytest.raises(Stopped, match="killed"):
        validation.run(0)
    left = contents(validation.folder(0))
    assert {name: whole[name] for name in left} == left and left.keys() == {
        n for n in whole if n.endswith(".mp4")
    }
    assert validation.measures(0) == {}  # as if this iteration had not been validated
    validation.may_end = may_end
    validation.run(0)
    assert contents(validation.folder(0)) == whole


def test_the_ema_is_validated_instead_of_the_policy(tiny_config, mesh):
    config = tiny_config.with_settings(**VALIDATED, ema_decay=0.9, learning_rate=1e-2)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    trainer.run_iteration()
    validated = []
    run = trainer.validation.run

    def watched(iteration):
        validated.append(
            {
                name: parameter.detach().clone()
                for name, parameter in trainer.run.policy.trained.items()
            }
        )
        return run(iteration)

    trainer.validation.run = watched
    average = {name: tensor.clone() for name, tensor in trainer.run.policy.ema.tensors().items()}
    trainer.validate()
    assert all(torch.equal(validated[0][name], average[name]) for name in average)
    policy = trainer.run.policy.trained
    assert not all(
        torch.equal(validated[0][name], policy[name]) for name in policy
    )  # the policy is restored after validation


def test_a_row_with_a_seed_has_the_noise_of_that_seed(tiny_config, mesh, tmp_path):
    (tmp_path / "seeds.csv").write_text(
        "prompt,seed\na red circle,7\na red circle,\na red circle,7\n"
    )
    settings = {
        "valid_video_csv": str(tmp_path / "seeds.csv"),
        "validation_steps": 1,
        "validation_repeats": 2,
    }
    trainer = Trainer(tiny_config.with_settings(**settings), mesh, CPU, scorers={"test": Redness()})
    noise = [trainer.validation._noise(row) for row in range(6)]
    assert torch.equal(noise[0], noise[4]) and torch.equal(noise[1], noise[5])
    assert len({each.sum().item() for each in noise}) == 4
    other = Trainer(
        tiny_config.with_settings(**settings, validation_seed=1),
        mesh,
        CPU,
        scorers={"test": Redness()},
    )
    same = [torch.equal(other.validation._noise(row), noise[row]) for row in range(6)]
    assert same == [True, True, False, False, True, True]
    trainer.validation.run(0)
    entries = json.loads((trainer.output_dir / "samples/000000/scores.json").read_text())
    assert [entry["seed"] for entry in entries] == [7, 7, 930, 930, 7, 7]


def test_validation_can_use_guidance_when_rollouts_do_not(tiny_config, mesh):
    settings = {"validation_cfg_scale": 3.0, "negative_prompt": "blurry"}
    config = tiny_config.with_settings(**VALIDATED, **settings, validation_steps=1)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    sampling = trainer.run.pipeline.sampling, trainer.validation.pipeline.sampling
    assert [settings.guidance.scale for settings in sampling] == [1, 3]
    batches = []
    trainer.run.policy.transformer.register_forward_pre_hook(
        lambda _, args: batches.append(len(args[0]))
    )
    list(trainer.validation.videos(trainer.validation.rows()[:1]))
    assert batches == [2]
    assert trainer.validation.made_with["guidance"] == [3, "blurry"]


READ_WITH = {
    "log_num_videos": 1,
    "validation_batch_size": 3,
    "decode_batch_size": 2,
    "hacking_threshold": 9.0,
    "seed": 3,
}
READ_WITH |= {"shift": 4.0, "validation_shift": 3.0}  # the shift of a validation is as before
NOT_READ_WITH = {
    "valid_video_csv": "assets/prompts/valid.csv",
    "validation_steps": 2,
    "validation_seed": 931,
    "validation_repeats": 2,
    "validation_num_frames": 9,
    "validation_height": 32,
    "validation_width": 32,
    "validation_shift": 7.0,
    "validation_cfg_scale": 2.0,
    "negative_prompt": "blurry",
    "guidance_interval": "0.2:0.8",
}


def test_a_validation_is_read_only_with_the_settings_that_made_it(validated):
    def is_read(**changes):
        config = validated_config(validated.output.parent).with_settings(**changes)
        requests = read_requests(*config.data.valid_video_csv)
        validation = Validation(
            config,
            validated.mesh,
            validated.pipeline,
            validated.encoder,
            validated.scorer,
            requests,
        )
        return bool(validation.measures(0))

    assert is_read() and is_read(**READ_WITH)
    assert not [name for name, value in NOT_READ_WITH.items() if is_read(**{name: value})]


def test_corrupted_records_cost_only_the_picture_of_the_summary(capsys, validated):
    folder = validated.folder(0)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (folder / "scores.json").write_text("[[]]")
    print_summary(folder.parents[1], 1, validated)
    for path, old in before.items():
        path.write_bytes(old)
    captured = capsys.readouterr()
    assert "before_after.png NOT WRITTEN" in captured.err and "iteration 0 -> 1" in captured.out


def validated_config(folder):
    settings = VALIDATED | {
        "pretrained_model_root": SHALLOW,
        "cfg_scale": 1.0,
        "max_steps": 1,
        "validation_steps": 1,
        "report_to": ["none"],
    }
    return load_config("configs/smoke.yaml", output_dir=str(folder)).with_settings(**settings)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """Return the validation of a run of one iteration."""
    config = validated_config(tmp_path_factory.mktemp("validated") / "run")
    trainer = Trainer(config, Mesh.single(), CPU, scorers={"test": Redness()})
    trainer.train()
    return trainer.validation


def test_a_validation_with_noise_samples_the_sde_of_the_rollouts_with_the_same_noise_each_time(
    tiny_config, mesh, tmp_path
):
    settings = {
        "sde_type": "cps",
        "validation_eta": 1.0,
        "validation_steps": 3,
        "validation_batch_size": 2,
    }
    config = tiny_config.with_settings(
        **settings, valid_video_csv="assets/miniature/prompts/smoke.csv"
    )
    check(config)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    validation = trainer.validation
    levels = shifted_levels(3, config.rollout.shift)
    assert [step.std for step in validation.schedule.transitions] == [*levels[1:-1], 0.0]
    assert validation.made_with["noise"] == "cps:1"
    requests = validation.requests[:2]
    conditions = trainer.run.encoder(requests, (1, 16, 16))
    found = validation.sample(conditions, validation._noises([0, 1]), [0, 1])
    alone = validation.sample(conditions.select([1]), validation._noises([1]), [1])
    # the noise of a row does not depend on others
    torch.testing.assert_close(found[1:], alone, rtol=1e-4, atol=1e-5)
    # x' = (1 - sigma') x0_hat + sigma' noise, with new noise in each step.
    latents = validation._noises([0, 1])
    for step, (sigma, sigma_next) in enumerate(zip(levels, levels[1:])):
        with torch.no_grad():
            velocity = validation.pipeline.velocity(
                latents, torch.full((2,), 1000 * sigma), conditions
            )
        noise = validation._noises([0, 1], "validation step noise", step)
        latents = (1 - sigma_next) * (latents - sigma * velocity) + sigma_next * noise
    torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-4)
    # a sampler that adds noise at eta 0, too, which the ODE must not use
    noisy = tmp_path / "noisy.py"
    noisy.write_text("def step(sigma, sigma_next, eta, second):\n    return 0.1\n")
    ode = config.with_settings(sde_type=f"{noisy}:step", validation_eta=0.0).validation_sampling
    assert not ode.schedule().stochastic_steps
    without = tiny_config.with_settings(**settings | {"validation_eta": 0.0})
    assert evaluation_settings(config)["validation_noise"] == "cps:1"
    assert "validation_noise" not in evaluation_settings(without)
    with pytest.raises(
        ValueError,
        match="validation_eta",
    ):
        check(config.with_settings(validation_eta=1.5))
