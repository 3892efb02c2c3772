"""Setting ``sde_type FILE.py:NAME``: accepted in flags and files, checked before a run, compared on
resume.
"""

import json

import pytest

from hyvideo.checks.rules import check, check_evaluation, check_sampling
from hyvideo.schedulers.noise_matching import total_variance
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.identity import code_of
from hyvideo.trainer import Trainer

LINEAR = (
    "def linear(sigma, sigma_next, eta, sigma_after_first):\n    return eta * (sigma - "
    "sigma_next)\n"
)
TEXT = (
    LINEAR
    + """
from hyvideo.schedulers.transitions import SAMPLERS, Sampler, Transition

cps = Sampler("Own CPS", SAMPLERS["cps"].step, max_eta=1.0, is_normalised=False)
broken = lambda sigma, sigma_next, eta, sigma_after_first: 1 / sigma_next
late = lambda sigma, sigma_next, eta, sigma_after_first: eta if sigma_next < 0.1 or sigma > 0.9 else float("nan")
"""
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(TEXT)
    return path


def test_a_sampler_file_is_accepted_from_flags_and_config(file, tmp_path):
    (tmp_path / "run.yaml").write_text(f"sde_type: {file}:linear\neta: 0.3\n")
    for config in (
        load_config(tmp_path / "run.yaml"),
        parse(["--sde_type", f"{file}:linear"]).config,
    ):
        assert config.rollout.sde_type == f"{file}:linear"


@pytest.mark.parametrize(
    "name, eta, named",
    [
        ("absent", 0.5, "absent"),
        ("broken", 0.5, "my.py:broken"),
        ("late", 0.5, "my.py:late"),
        ("cps", 1.5, "eta .*my.py:cps"),
    ],
)
def test_a_broken_sampler_is_reported_before_a_run(file, tiny_config, tmp_path, name, eta, named):
    config = tiny_config.with_settings(sde_type=f"{file}:{name}", eta=eta)
    with pytest.raises(ValueError, match=named):
        check(config)
    with pytest.raises(ValueError, match=named):
        check_sampling(
            config.sampling,
            version="miniature",
            root=config.model.pretrained_model_root,
            output=tmp_path,
        )


def test_programs_that_do_not_use_the_sampler_do_not_need_its_file(tiny_config, tmp_path):
    gone = {"sde_type": f"{tmp_path}/gone.py:f", "eta": "sage_grpo:0.5"}
    config = tiny_config.with_settings(**gone).resolved()
    check_evaluation(config.reward, root=config.model.pretrained_model_root, output=tmp_path)
    check_sampling(
        config.validation_sampling,
        version="miniature",
        root=config.model.pretrained_model_root,
        output=tmp_path,
    )
    with pytest.raises(ValueError, match="gone.py"):
        check_sampling(
            config.sampling,
            version="miniature",
            root=config.model.pretrained_model_root,
            output=tmp_path,
        )


def test_a_sampler_that_raises_ends_post_train_with_code_2(tmp_path, monkeypatch, capsys):
    import post_train

    (tmp_path / "my.py").write_text("def f(*_):\n    return 1 / 0")
    flags = ["--config", "configs/smoke.yaml", "--output_dir", str(tmp_path / "run"), "--sde_type"]
    monkeypatch.setattr("sys.argv", ["post_train.py", *flags, f"{tmp_path}/my.py:f"])
    assert post_train.main() == 2
    assert "my.py:f" in capsys.readouterr().err


# --- noise matching ----------------------------------------------------------------------------


def test_a_sampler_file_can_be_matched_and_be_a_target(file, tiny_config):
    """``V = eta d`` without the last step sums to ``eta (1 - sigma_3)``."""
    place, levels = f"{file}:linear", shifted_levels(4, 3.0)
    wanted = total_variance("sage_grpo", levels, 0.5, "deterministic")
    config = tiny_config.with_settings(sde_type=place, eta="sage_grpo:0.5").resolved()
    check(config)
    assert config.sampling.eta == pytest.approx(wanted / (1 - levels[3]), rel=1e-12)
    config = tiny_config.with_settings(sde_type="dance_grpo", eta=f"{place}:0.25").resolved()
    assert config.sampling.eta == pytest.approx(0.5, rel=1e-12)


# --- identity ----------------------------------------------------------------------------------


def test_the_code_of_a_run_includes_the_sampler_file(file, tiny_config):
    config = tiny_config.with_settings(sde_type=f"{file}:linear")
    assert code_of(config)["sde_type"] == [file]
    assert "sde_type" not in code_of(tiny_config)


@pytest.mark.system
def test_a_run_trains_with_a_sampler_file_resumes_and_rejects_an_edited_one(
    file, tiny_config, mesh
):
    import torch

    config = tiny_config.with_settings(sde_type=f"{file}:linear", max_steps=1, save_interval=1)
    Trainer(config, mesh, torch.device("cpu")).train()
    lines = (file.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["policy/ratio_max_deviation"] == 0
    config = config.with_settings(max_steps=2)
    file.write_text(TEXT.replace("eta * (", "2 * eta * ("))
    with pytest.raises(ValueError, match="--allow_changed_settings sde_type$"):
        Trainer(config, mesh, torch.device("cpu"))
