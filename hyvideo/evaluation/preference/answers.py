"""Answers of raters in a database: one for each pair, on the disk before the next pair is shown."""

import sqlite3
import threading
import time
from pathlib import Path

from hyvideo.data.outside import parse_json, shown
from hyvideo.evaluation.preference.study import STUDY

DATABASE = "answers.sqlite"
CHOICES = ("first", "second", "tie", "both_bad")
SCHEMA = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS answers
    (rater TEXT, pair TEXT, question TEXT, answer TEXT, at REAL, PRIMARY KEY (pair, question))"""


class Study:
    """A study's raters by token, and its database, which any number of threads and processes may use."""

    def __init__(self, folder: Path):
        if not (folder / STUDY).is_file():
            raise ValueError(f"a study is a folder with {STUDY}, which `make` writes, got {shown(folder)}")
        content = parse_json((folder / STUDY).read_text(encoding="utf-8"))
        self.folder, self.questions, self.raters = folder, content["questions"], content["raters"]
        self._database = sqlite3.connect(folder / DATABASE, timeout=30, check_same_thread=False)
        self._database.row_factory, self._lock = sqlite3.Row, threading.Lock()
        self._database.executescript(SCHEMA)

    def state(self, token: str) -> dict:
        """What the page needs: the questions, the rater's progress, and the first pair without an answer, or None."""
        done, pairs = {row["pair"] for row in self.rows()}, self.raters[token]["pairs"]
        waiting = [{"id": name, "prompt": pair["prompt"]} for name, pair in pairs.items() if name not in done]
        counts = {"done": len(pairs) - len(waiting), "total": len(pairs)}
        return {"questions": self.questions, **counts, "pair": waiting[0] if waiting else None}

    def add(self, token: str, pair: object, answers: object, at: float | None = None) -> None:
        """Commits a rater's answers to a pair, unless it has some. Raises ValueError for what cannot be one."""
        if token not in self.raters or not isinstance(pair, str) or pair not in self.raters[token]["pairs"]:
            raise ValueError("the pair is not one of a rater of this study with this token")
        if not isinstance(answers, dict) or answers.keys() != self.questions.keys():
            raise ValueError(f"an answer is needed to each of {', '.join(self.questions)}, and to nothing else")
        if not all(answer in CHOICES for answer in answers.values()):
            raise ValueError(f"an answer is one of {', '.join(CHOICES)}")
        name, at = self.raters[token]["name"], at or time.time()
        rows = [(name, pair, question, answer, at) for question, answer in answers.items()]
        with self._lock, self._database:
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)", rows)

    def add_file(self, path: Path) -> None:
        """Adds what a page without a server saved. Raises ValueError for another content."""
        content = parse_json(path.read_text(encoding="utf-8"))
        try:
            given = [(content["token"], e["pair"], e["answers"], float(e["at"])) for e in content["answers"]]
            for answer in given:
                self.add(*answer)
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"{path} is not a file of answers as the page saves it: {error!r}") from error

    def rows(self) -> list[sqlite3.Row]:
        """All answers in their order: rater, pair, question, answer, at (seconds since 1970)."""
        with self._lock:
            return self._database.execute("SELECT * FROM answers ORDER BY at, rowid").fetchall()
