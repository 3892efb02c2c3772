"""Statements about a run, and what an audit finds of each."""

import math
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest

AGREES, DIFFERS, UNCHECKED = "agrees", "differs", "cannot be checked"


class CannotCheck(Exception):
    """The reason for which a statement cannot be checked."""


class Inapplicable(Exception):
    """Raised where a statement does not concern the run, so that the audit does not list it."""


@dataclass(frozen=True)
class Statement:
    """A row of an audit."""

    topic: str
    text: str  # what was recomputed
    files: str  # from which
    verdict: str
    count: int = 0  # compared values
    difference: float | None = None  # the largest; of values that are no numbers, how many differ
    because: str = ""  # where it differs first, or why it cannot be checked


@dataclass
class Comparison:
    """Collects the values of one statement."""

    tolerance: float  # of numbers, relative to their scale
    count: int = 0
    largest: float = 0.0
    differing: int = 0
    first: str = ""

    def number(
        self,
        where: str,
        expected: float | None,
        found: float | None,
        scale: float | None = None,
    ) -> None:
        """Compare two numbers; None and NaN are missing values, equal to one another. ``scale``: what
        their difference is relative to; the larger of 1 and the expected value unless given.
        """
        self.count += 1
        missing = [value is None or math.isnan(value) for value in (expected, found)]
        if any(missing):
            difference = 0.0 if all(missing) else math.inf
        elif expected == found:  # also two infinities
            difference = 0.0
        elif math.isinf(expected) or math.isinf(found):
            difference = math.inf
        else:
            difference = abs(expected - found) / (scale or max(1.0, abs(expected)))
        self.largest = max(self.largest, difference)
        if difference > self.tolerance:
            self._differ(where, expected, found)

    def numbers(self, where: str, expected: Sequence, found: Sequence) -> None:
        """Compare lists of numbers."""
        if not self.equal(f"length of {where}", len(expected), len(found)):
            return
        for number, pair in enumerate(zip(expected, found)):
            self.number(f"{where}, value {number}", *pair)

    def equal(self, where: str, expected: object, found: object) -> bool:
        """Compare values that must be equal, and return whether they are."""
        self.count += 1
        if expected == found:
            return True
        self.largest = max(self.largest, 1.0)
        self._differ(where, expected, found)
        return False

    def small(self, where: str, value: float, limit: float) -> None:
        """Compare a number that must not exceed a limit."""
        self.count += 1
        self.largest = max(self.largest, value)
        if not value <= limit:
            self._differ(where, f"at most {limit:g}", value)

    def _differ(self, where: str, expected: object, found: object) -> None:
        self.differing += 1
        if not self.first:
            self.first = f"{where}: {_shown(expected)} recomputed, {_shown(found)} recorded"


def _shown(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


@dataclass
class Audit:
    """The statements of an audit."""

    statements: list[Statement] = field(default_factory=list)

    @contextmanager
    def compare(self, topic: str, text: str, files: str, tolerance: float = 1e-6):
        """Record a statement from the comparisons of the body, which may raise `CannotCheck` or
        `Inapplicable`.
        """
        found = Comparison(tolerance)
        reason = ""
        try:
            yield found
        except Inapplicable:
            return
        except CannotCheck as error:
            reason = str(error)
        except KeyError as error:
            reason = f"the files lack {error}"
        except Exception as error:  # of a damaged file; the other statements are still checked
            reason = f"{type(error).__name__}: {error}"
        if not found.count:
            reason = reason or "the run has recorded no values of this kind"
        if reason and not found.differing:  # a difference that was found before is reported
            self.cannot(topic, text, files, reason)
            return
        verdict, because = AGREES, ""
        if found.differing:
            verdict = DIFFERS
            because = f"{found.differing} of {found.count} differ, first {found.first}"
            because += f"; the others cannot be checked: {reason}" if reason else ""
        self.statements.append(
            Statement(topic, text, files, verdict, found.count, found.largest, because)
        )

    def cannot(self, topic: str, text: str, files: str, because: str) -> None:
        """Record a statement that cannot be checked."""
        self.statements.append(Statement(topic, text, files, UNCHECKED, because=because))

    def add(self, other: "Audit", prefix: str = "") -> None:
        """Add the statements of another audit, with a prefix before their topics."""
        for each in other.statements:
            self.statements.append(replace(each, topic=prefix + each.topic))

    @property
    def differs(self) -> bool:
        return any(statement.verdict == DIFFERS for statement in self.statements)

    def as_rows(self) -> list[dict]:
        """Return the statements as values of JSON."""
        rows = [asdict(statement) for statement in self.statements]
        for row in rows:
            if row["difference"] is not None and not math.isfinite(row["difference"]):
                row["difference"] = None
        return rows

    def as_text(self) -> str:
        """Return the statements as lines, by topic, and their number by verdict."""
        lines = []
        for topic in dict.fromkeys(statement.topic for statement in self.statements):
            lines.append(f"\n{topic}")
            rows = [statement for statement in self.statements if statement.topic == topic]
            for each, after in zip_longest(rows, rows[1:]):
                lines.append(f"  {_mark(each):<18}{each.text} ({each.files})")
                # statements in a row with the same reason have it once
                if each.because and not (after and after.because == each.because):
                    because = "" if each.verdict == DIFFERS else "because "
                    lines.append(f"  {'':<18}  {because}{each.because}")
        lines.append(f"\n{summary(self.statements)}")
        return "\n".join(lines).lstrip("\n")


def summary(statements: Iterable[Statement]) -> str:
    """Return how many statements have each verdict, in words."""
    statements = list(statements)
    counts = {
        verdict: sum(each.verdict == verdict for each in statements)
        for verdict in (AGREES, DIFFERS, UNCHECKED)
    }
    return (
        f"{counts[AGREES]} statements agree, {counts[DIFFERS]} differ, "
        f"{counts[UNCHECKED]} cannot be checked"
    )


def _mark(statement: Statement) -> str:
    if statement.verdict == AGREES and statement.difference:
        return f"agrees {statement.difference:.0e}"
    return statement.verdict
