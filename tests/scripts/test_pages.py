"""The parts of pages that `scripts.pages` writes."""

import pytest

from hyvideo.planning.memory import memory
from scripts.pages.__main__ import main, with_part
from scripts.pages.plan_tables import RECIPES, planned
from tests.forked import ROOT
from tests.test_docs import TEXTS


def test_a_page_that_follows_from_the_code_is_up_to_date(capsys):
    main(["--check", "docs/settings.md", "docs/monitoring.md", "docs/ratings.md"])
    assert capsys.readouterr().out == ""


@pytest.mark.system
def test_all_pages_are_up_to_date(capsys):
    main(["--check"])
    assert capsys.readouterr().out == ""


def test_every_file_of_results_is_linked_on_the_page_that_shows_it():
    """Its numbers can be recomputed: python -m scripts.seed_tables."""
    for file in (ROOT / "docs/data").iterdir():
        assert any(f"data/{file.name}" in text for text in TEXTS.values()), file.name


def test_the_recipes_from_images_fit_their_gpus_also_with_a_last_frame():
    for recipe in (each for each in RECIPES if each.config.startswith("wan21_i2v_14b")):
        run = planned(recipe, "--transformer_version", "wan2.1_flf2v_14b_720p")
        assert memory(run).needed_gib <= recipe.hardware.gpu_memory - 1.0, recipe


def test_every_recipe_has_a_row_in_the_table_of_costs_and_fits_its_gpus():
    names = {
        str(path.relative_to(ROOT / "configs").with_suffix(""))
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    large = {
        name for name in names if name.startswith(("wan2", "hunyuanvideo15", "paper/table2_b"))
    }
    assert large == {recipe.config for recipe in RECIPES}
    for recipe in RECIPES:
        assert memory(planned(recipe)).needed_gib <= recipe.hardware.gpu_memory - 1.0, recipe


def test_a_part_is_replaced_between_its_comments():
    page = "a\n<!-- begin x -->\n\nold\n\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    made = with_part(page, "x", "new \\1\n")
    assert made.startswith("a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n")
    assert with_part(made, "x", "new \\1\n") == made
    for damaged in (page.replace("<!-- end x -->", ""), page + page):
        with pytest.raises(ValueError, match="begin x"):
            with_part(damaged, "x", "new")
