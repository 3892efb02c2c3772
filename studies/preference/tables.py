"""Results of a preference study as text: the win rates, like Table 3 of the paper, as Markdown, CSV
and LaTeX, the pairs as CSV, and the analysis.
"""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from hyvideo.data.csv_files import csv_text

_ESCAPES = str.maketrans(
    {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {character: f"\\{character}" for character in "_&%#${}"}
)


def win_rates(questions: dict[str, dict]) -> list[tuple[dict, ...]]:
    """Return a row for each two methods, with a win rate for each question."""
    return list(zip(*(result["win_rates"] for result in questions.values())))


def pairs_csv(counted: Sequence[SimpleNamespace]) -> str:
    """Format the answers that count, with the first frames if there are any."""
    columns = ["prompt", "first", "second", "dimension", "answer", "rater"]
    if any(j.ref_image_path for j in counted):
        columns.append("ref_image_path")
    return csv_text(columns, [[getattr(j, name) for name in columns] for j in counted])


def table3_csv(questions: dict[str, dict]) -> str:
    """Format the win rates and their 95 % intervals as shares from 0 to 1; missing ones are empty.

    ``questions`` has the result of `analysis.question_results` by name.
    """
    heads = ["method", "against", "raters"]
    for name in questions:
        heads += [name, f"{name} low", f"{name} high"]
    rows = []
    for rates in win_rates(questions):
        row = [rates[0]["method"], rates[0]["against"], rates[0]["raters"]]
        for rate in rates:
            numbers = [rate["mean"], rate["low"], rate["high"]]
            row += ["" if number is None else f"{number:.6g}" for number in numbers]
        rows.append(row)
    return csv_text(heads, rows)


def table3_md(questions: dict[str, dict], counted: Sequence[SimpleNamespace]) -> str:
    heads = ["Method", "Against", "Raters", *(f"{name} (%)" for name in questions)]
    rows = []
    for rates in win_rates(questions):
        labels = [
            _escaped_md(rates[0]["method"]),
            _escaped_md(rates[0]["against"]),
            str(rates[0]["raters"]),
        ]
        rows.append([*labels, *map(_percent, rates)])
    return "\n".join([*_table(heads, rows), "", _caption(counted)])


def table3_tex(questions: dict[str, dict], counted: Sequence[SimpleNamespace]) -> str:
    """Format a tabular with booktabs rules."""
    heads = ["Method", "Against", "Raters", *(rf"{escaped(name)} (\%)" for name in questions)]
    lines = [
        f"% {_caption(counted)}",
        rf"\begin{{tabular}}{{llc{'c' * len(questions)}}}",
        r"\toprule",
        rf"{' & '.join(heads)} \\",
        r"\midrule",
    ]
    for rates in win_rates(questions):
        labels = [
            escaped(rates[0]["method"]),
            escaped(rates[0]["against"]),
            str(rates[0]["raters"]),
        ]
        lines.append(rf"{' & '.join([*labels, *map(_percent, rates)])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def analysis_md(results: dict, counted: Sequence[SimpleNamespace]) -> str:
    """Format the whole analysis, of results as in analysis.json, and describe its rules."""
    questions = results["questions"]
    names = list(questions)
    raters = []
    for rater, failed in results["checks"].items():
        excluded = "excluded" if rater in results["left_out"] else ""
        side = results["one_sided"].get(rater)
        always = f"always {side}" if side else ""
        raters.append([rater, str(sum(failed)), str(len(failed)), always, excluded])
    strengths = []
    for method in results["methods"]:
        values = [_number(result["strengths"][method]) for result in questions.values()]
        strengths.append([_escaped_md(method), *values])
    lines = [
        "# Preference study",
        "",
        table3_md(questions, counted),
        "",
        "## Raters",
        "",
        f"Raters who fail more than {100 * results['most_failed']:.0f} % of the attention checks "
        f"on {names[-1]} are excluded. An identical pair must be answered with a tie or both bad; "
        "a repeated pair, shown with sides swapped, must not have the opposite winner. Checks do "
        "not count towards the win rates.",
        "",
        *_table(["Rater", "Checks failed", "Checks", "Side", ""], raters),
        *_one_sided(results),
        "",
        "## Strengths",
        "",
        "Bradley-Terry strengths: log odds against an average method. A tie counts as half a win "
        "for each method, and half a win of each method over each other one is added as "
        "regularization.",
        "",
        *_table(["Method", *names], strengths),
        "",
        "## Agreement",
        "",
        *_table(["", *names], _agreement(questions, counted)),
    ]
    return "\n".join(lines)


def _agreement(questions: dict[str, dict], counted: Sequence[SimpleNamespace]) -> list[list[str]]:
    """Return rows on how far answers agree with each other and with the reward model."""
    found = questions.values()
    rows = [
        [
            "Krippendorff's alpha (ordinal: loss, tie, win)",
            *(_number(result["alpha"]) for result in found),
        ],
        [
            "Video A won, % (50: no bias)",
            *(_percent(result["first_side"]) for result in found),
        ],
        [
            "Winner has the higher reward model score, %",
            *(_percent(result["reward_model"]) for result in found),
        ],
    ]
    for answer, label in (("tie", "Ties"), ("both_bad", "Both bad")):
        given = Counter(j.dimension for j in counted if j.answer == answer)
        rows.append([label, *(str(given[name]) for name in questions)])
    return rows


def _one_sided(results: dict) -> list[str]:
    """Return a sentence that names raters who always prefer one side and still count, if there are
    any.
    """
    counted = [rater for rater in results["one_sided"] if rater not in results["left_out"]]
    if not counted:
        return []
    return [
        "",
        f"**Always the same side:** {', '.join(counted)}. A rater who looks at the videos rarely "
        f"prefers one side in all pairs. Leave them out with `--exclude {' '.join(counted)}`.",
    ]


def escaped(text: str) -> str:
    """Escape text for LaTeX."""
    return text.translate(_ESCAPES)


def _escaped_md(text: str) -> str:
    return text.replace("|", "\\|")


def _percent(share: dict) -> str:
    if share["mean"] is None:
        return "-"
    return f"{100 * share['mean']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _caption(counted: Sequence[SimpleNamespace]) -> str:
    prompts = {j.prompt for j in counted}
    return (
        f"Win rate of the method on {len(prompts)} prompts; a tie or both bad counts as half a "
        "win. Brackets: 95 % intervals over raters and prompts."
    )


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows]]
