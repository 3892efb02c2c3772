"""Settings and paths that nobody meant, in files and flags: used, or refused in one message; nothing is written.

Inputs are drawn by hypothesis, the same ones every time.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hyvideo.config.command_line import MAX_BYTES, load_config, parse, read_yaml
from hyvideo.config.rules import check
from hyvideo.config.settings import Config
from hyvideo.data.outside import file_problem, folder_problem, unwritable
from hyvideo.data.prompts import read_requests
from hyvideo.distributed.checkpoint import read_state
from hyvideo.models.weight_files import Folder, weight_paths
from hyvideo.training.model_setup import choose_device
from hyvideo.training.rewards import make_async_scorer
from tests.fuzzing import ODD, contents, fuzzed, outcome

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ("--config", "configs/smoke.yaml")
NAMES = sorted(Config().flat())
PATHS = ("pretrained_model_root", "prompts_csv", "output_dir", "conditions_dir", "resume_from_checkpoint")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of what is tried; the working directory is the project's."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "input").mkdir()
    return tmp_path / "input"


WORD = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*ODD, "yes", "1e3", "0x10", "-1", "nan", "inf", "1e999", "9" * 5000, "x" * 20_000, "../..", "~"]),
    st.sampled_from(["sage_grpo", "cps:1", "fixed:0:1", "random:99999999999999999999", "cps", '{"VQ": 1e999}', "{"]),
    # Numbers that a machine could meet: what steps and pixels cost is the user's.
    st.integers(-1_000, 1_000).map(str),
    st.floats(-1e6, 1e6).map(str),
)
VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1_000, 1_000),
        st.floats(-1e6, 1e6),
        WORD,
        st.dates(),
        st.binary(max_size=5),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
NAME = st.one_of(st.sampled_from(NAMES), st.text(max_size=8), st.sampled_from(["--eta", "config", "environment"]))


def checked(argv: list[str]) -> Config:
    config = parse(argv).config
    check(config)
    return config


@fuzzed(250)
@given(flags=st.lists(st.tuples(NAME, WORD), max_size=3), joined=st.booleans())
def test_any_flags_make_settings_or_are_refused(folder, flags, joined):
    before = contents(folder)
    given_ = [part for name, word in flags for part in ([f"--{name}={word}"] if joined else [f"--{name}", word])]
    if "--help" in given_ or "-h" in given_:
        return
    argv = [*SMOKE, "--output_dir", str(folder / "run"), *given_]
    outcome(lambda: checked(argv))
    assert contents(folder) == before


@fuzzed(250)
@given(content=st.dictionaries(NAME, VALUE, max_size=4), style=st.sampled_from([None, True, False]))
def test_any_settings_file_makes_settings_or_is_refused(folder, content, style):
    base = {"prompts_csv": "assets/miniature/prompts/train.csv", "pretrained_model_root": "assets/miniature"}
    path = folder / "run.yaml"
    path.write_bytes(
        yaml.safe_dump(base | content, default_flow_style=style, allow_unicode=True).encode(errors="replace")
    )
    before = contents(folder)
    outcome(lambda: checked(["--config", str(path), "--output_dir", str(folder / "run")]))
    assert contents(folder) == before


@fuzzed(250)
@given(
    content=st.one_of(st.binary(max_size=60), st.text("abc:-[]{}&*!|>\"'#%@,?\n\t 019.~", max_size=60).map(str.encode))
)
def test_any_bytes_are_yaml_or_refused(folder, content):
    (folder / "run.yaml").write_bytes(content)
    outcome(lambda: read_yaml(folder / "run.yaml"))


@fuzzed(150)
@given(
    name=st.sampled_from(PATHS),
    parts=st.lists(
        st.sampled_from(["a", "/", "..", ".", "\0", "\udcff", "é", "🐱", " ", "loop/", "x" * 260]), max_size=8
    ),
)
def test_any_path_is_used_or_refused(folder, name, parts):
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to(folder / "loop")
    before = contents(folder)
    argv = [*SMOKE, "--output_dir", str(folder / "run"), f"--{name}={folder / 'sub'}/{''.join(parts)}"]
    outcome(lambda: checked(argv))
    assert contents(folder) == before


@pytest.mark.parametrize(
    "text, said",
    [
        ("learning_rate: yes", "must not be a bool, got true .YAML reads yes"),
        ("output_dir: on", "must not be a bool, got true"),
        ("seed: 1e3", "must be an integer, got 1000"),
        ("height: 1:30", "invalid int value: '1:30'"),
        ("eta: 2026-01-01", "invalid float value: '2026-01-01'"),
        ("eta: {a: {b: 1}}", "must be a single value, got a mapping"),
        ("report_to: [[none]]", "must be a list of text, got"),
        ("eta: 0.5\neta: 0.6", "line 2 repeats 'eta'"),
        ("<<: {eta: 1}", "unknown setting '<<'"),
        ("eta: !!python/name:os.system", "is not valid YAML: could not determine a constructor for the tag"),
        ("eta: !!bool maybe", "is not valid YAML"),
        ("eta: " + "{a: " * 5_000, "is not valid YAML"),
        ("#" + "x" * MAX_BYTES, "it has 1,049,[0-9]{3} bytes, the limit is 1,048,576"),
        ("eta: \x07", "is not valid YAML"),
        ("eta: 1e200", "eta must be at most 1000, got 1e\\+200"),
        ("match_noise: sage_grpo:1e308", r"eta is in \(0, 1000\]"),
        ('output_dir: "a\\0b"', "output_dir must be a writable folder, .*characters that no path can have"),
        ("reward_weights: {VQ: 2026-01-01}", "reward_weights must be"),
        ("reward_weights: '" + "[" * 3_000 + "'", "reward_weights must be"),
        ("transformer_version: ../../etc", "not a path"),
        ("sde_window: random:" + "9" * 4_000, "sde_window must be"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_words(folder, text, said):
    given_ = {line.split(":")[0] for line in text.splitlines()}
    base = [line for line in (ROOT / "configs/smoke.yaml").read_text().splitlines() if line.split(":")[0] not in given_]
    path = folder / "run.yaml"
    path.write_text("\n".join([text, *base, f"conditions_dir: {folder / 'conditions'}"]))
    _, message = outcome(lambda: checked(["--config", str(path)]))
    assert message is not None
    with pytest.raises(ValueError, match=said):
        raise ValueError(message)


def test_a_file_that_a_run_leaves_is_within_the_limits():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert isinstance(read_yaml(path), dict)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--lora_rank", "4", "--lora_target_modules", "(("], "lora_target_modules must be regular expressions"),
        (["--fps", "1e-300"], "fps must be at least 0.01"),
        (["--remote_reward_url", "http://a:99999"], "reward services need URLs such as"),
        (["--remote_reward_url", "file:///etc/passwd"], "reward services need URLs such as"),
        (["--reward_config", "miniature: {path: 5}"], "have the wrong type: got path 5"),
        (["--reward_config", "miniature: {device: cuda}"], "must not set device of miniature"),
    ],
)
def test_what_scorers_and_adapters_are_given_is_looked_at(folder, flags, said):
    if flags[0] == "--reward_config":
        (folder / "reward.yaml").write_text(flags[1])
        flags = [flags[0], str(folder / "reward.yaml")]
    with pytest.raises(ValueError, match=said):
        make_async_scorer(checked([*SMOKE, "--output_dir", str(folder / "run"), *flags]), torch.device("cpu"))


def test_a_process_without_a_gpu_of_its_own_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="needs a separate GPU: got 2 GPUs for process 3"):
        choose_device("auto", 2)


@pytest.mark.parametrize("names", [{"a": "../other.safetensors"}, {"a": "/etc/passwd"}, {"a": {}}, [{}]])
def test_an_index_of_weights_names_files_of_its_folder_only(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder.parent / "other.safetensors").write_text("")
    with pytest.raises(ValueError, match="must list files in its own folder"):
        weight_paths(Folder(folder, "label"), "model")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"iteration": true}', '{"iteration": "1"}', "x"])
def test_a_state_that_is_none_is_refused(folder, text):
    (folder / "state.json").write_text(text)
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        read_state(folder, needed={"iteration": int})


@pytest.mark.parametrize("name", ["pretrained_model_root", "output_dir", "prompts_csv", "conditions_dir"])
@pytest.mark.parametrize("below", ["", "/below"])
def test_a_loop_of_links_is_named(folder, name, below):
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    config = load_config("configs/smoke.yaml", output_dir=str(folder / "run"))
    with pytest.raises(
        ValueError, match=f"{'a prompts CSV' if name == 'prompts_csv' else name} must .*too many levels"
    ):
        check(config.with_settings(**{name: f"{folder}/one{below}"}))


@pytest.mark.parametrize("name", ["output_dir", "conditions_dir"])
@pytest.mark.parametrize(
    "path, said",
    [
        ("file", "file is not a folder"),
        ("file/below/it", "file is not a folder"),
        ("dangling", "is a broken link"),
        ("x" * 300, "a part of it has more than 255 bytes"),
        ("new/" + "é" * 200, "a part of it has more than 255 bytes"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(folder, name, path, said):
    (folder / "file").write_text("")
    (folder / "dangling").symlink_to(folder / "nowhere")
    config = load_config("configs/smoke.yaml", output_dir=str(folder / "run"))
    with pytest.raises(ValueError, match=f"{name} must be a writable folder, .*{said}"):
        check(config.with_settings(**{name: str(folder / path)}))


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "."])
def test_what_has_no_end_is_not_read(folder, path):
    os.mkfifo(folder / "pipe")
    path = str(folder / path)
    _, message = outcome(lambda: parse(["--config", path]))
    assert "must be a readable YAML file" in message
    with pytest.raises(ValueError, match="must be a readable file"):
        read_requests(path)


@contextlib.contextmanager
def as_nobody():
    """Without the permissions of root, for a while."""
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes permissions from itself, which root alone can")
def test_what_there_is_no_permission_for_is_named():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        open_, closed = Path(name), Path(name) / "closed"
        closed.mkdir(mode=0o700)
        (open_ / "file").touch(mode=0o600)
        open_.chmod(0o755)
        with as_nobody():
            assert file_problem(open_ / "file", 9) == folder_problem(closed) == "no permission to read it"
            assert file_problem(closed / "file", 9) == unwritable(closed / "a/b") == "permission denied"
            assert unwritable(open_ / "run") == f"no permission to write in {open_}"
