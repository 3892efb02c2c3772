"""The notebook runs from top to bottom, and its committed outputs show videos."""

import re
from base64 import b64decode
from io import BytesIO

import nbformat
import pytest
from PIL import Image

from tests.forked import ROOT, python

NOTEBOOK = ROOT / "examples/quickstart.ipynb"
MAX_BYTES = 600_000  # with its outputs
PROMPTS = "assets/miniature/prompts/smoke.csv"
SMALL = (
    "--batch_size 8 --num_generations 4 --mini_batch_size_per_update 4 --grpo_sampling_steps 4 "
    f"--sde_window fixed:0:2 --valid_video_csv {PROMPTS} --validation_batch_size 8 "
    "--validation_repeats 1 --validation_steps 2"
)


def moving_pictures(notebook):
    """Yield the pictures in the outputs of a notebook."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            html = output.get("data", {}).get("text/html", "")
            for content in re.findall(r"data:image/webp;base64,([^\"]+)", html):
                yield Image.open(BytesIO(b64decode(content)))


def test_the_committed_notebook_has_its_videos_and_no_error():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [picture.n_frames > 1 for picture in moving_pictures(notebook)] == [True] * 3
    assert NOTEBOOK.stat().st_size < MAX_BYTES


@pytest.mark.parametrize(
    "is_small",
    [
        pytest.param(True, marks=pytest.mark.system, id="small"),
        pytest.param(False, marks=pytest.mark.slow, id="as it is"),
    ],
)
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, is_small):
    """Outside the repository, whose files it reads through links."""
    from nbclient import NotebookClient  # slow to import

    box = tmp_path / "box"
    (box / "examples").mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git", "examples"):
            (box / path.name).symlink_to(path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if is_small:
        for cell in notebook.cells:
            # the checkpoints of iterations 10 and 30 become those of 1 and 2
            cell.source = re.sub(
                r"(post_train\.py --config \S+)",
                rf"\1 {SMALL} --save_interval 1 --validation_interval 2",
                cell.source,
            )
            cell.source = cell.source.replace(
                "outputs/notebook >", "outputs/notebook --max_steps 2 >"
            )
            cell.source = cell.source.replace("--max_steps 10", "--max_steps 1")
            cell.source = cell.source.replace("python = sys.executable", f'python = "{python()}"')
            cell.source = cell.source.replace(
                '"--output_dir", folder]', '"--output_dir", folder, "--validation_steps", "2"]'
            )
            cell.source = cell.source.replace("/000010", "/000001").replace("/000030", "/000002")
    client = NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": box / "examples"}},
    )
    client.execute()
    pictures = list(moving_pictures(notebook))
    assert [picture.n_frames > 1 for picture in pictures] == [True] * 3
    assert (box / "outputs/notebook/report.html").is_file()
    assert (box / "outputs/notebook_bright/checkpoints").is_dir()
