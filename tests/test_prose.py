"""Phrases that the project avoids, with the words to use instead."""

import re
import subprocess

import pytest

from tests.forked import ROOT

SUFFIXES = {
    ".md",
    ".py",
    ".yaml",
    ".toml",
    ".jinja",
    ".html",
    ".j2",
    ".js",
    ".sh",
    ".sbatch",
    ".cff",
}
THIS = "tests/test_prose.py"
PHRASES = {
    r"\b(?:go|goes|going|went|gone) on\b": "resume, continue",
    r"\b(?:life|lives)\b": "process, run, restart",
    r"\bwhoever\b": "users who, or nothing",
    r"\bthe short of it\b": "state what the page covers",
    r"\bof (?:one's|your|its|their|my) own\b|\bone's own\b": "custom, separate",
    r"\b(?:told|tells)\b": "reports, prints, passes",
    r"\bwants\b": "needs, requires",
    r"\b(?:is|are|was|were|be|been) refused\b|\brefusals\b": "raises an error, is rejected, error",
    r"(?<!-)\bdamaged\b": "corrupted",
    r"\bfloors\b": "layers",
    r"\b(?:does|do) nothing\b": "has no effect",
    r"\bis asked\b|\bwas asked\b|\basked (?:for|of)\b": "requested",
    r"\b(?:a|each|every|per|one|this|next) round\b": "iteration",
    r"\bClaims (?:that|whether)\b": "Return whether",
    r"\bhears\b": "receives, is called with",
    r"\bby the ODE\b": "with the ODE",
    r"\bmethod\.md\b": "the paper's equation, or a page in docs/",
    r"\bthe dead\b": "ranks that have exited",
    r"\bin peace\b|\bnobody killed\b": "uninterrupted",
    r"\bby itself\b": "alone, separately, automatically",
    r"\bupon which\b": "then",
}


def tracked():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in names
        if (ROOT / name).suffix in SUFFIXES
    }


TEXTS = {name: text for name, text in tracked().items() if name != THIS}


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_phrase_is_not_used(phrase):
    """Lines are joined, so that a phrase is found across a line break."""
    places = {
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}": match.group()
        for name, text in TEXTS.items()
        for match in re.finditer(phrase.replace(" ", r"\s+(?:#\s+)?"), text, re.IGNORECASE)
    }
    assert not places, f"write instead: {PHRASES[phrase]}"
