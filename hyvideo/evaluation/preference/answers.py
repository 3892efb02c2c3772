"""Answers of raters in a database: one for each pair, on the disk before the next pair is shown."""

import sqlite3
import threading
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from hyvideo.data.outside import parse_json

STUDY, KEY, VIDEOS, DATABASE = "study.json", "key.json", "videos", "answers.sqlite"  # in a study's folder
SIDES = ("first", "second")
SCHEMA = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE IF NOT EXISTS answers (rater TEXT,
    pair TEXT, dimension TEXT, answer TEXT, at TEXT DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (pair, dimension))"""


class Answers(BaseModel):
    """What the page sends of a pair, or saves of all, in JSON: a rater's answers by pair and dimension."""

    token: str
    answers: dict[str, dict[str, Literal["first", "second", "tie", "both_bad"]]]


class Study:
    """A study's raters by token, and its database, which any number of threads and processes may use."""

    def __init__(self, folder: Path):
        content = parse_json((folder / STUDY).read_text(encoding="utf-8"))
        self.folder, self.questions, self.raters = folder, content["questions"], content["raters"]
        self._database = sqlite3.connect(folder / DATABASE, timeout=30, check_same_thread=False)
        self._database.row_factory, self._lock = sqlite3.Row, threading.Lock()
        self._database.executescript(SCHEMA)

    def state(self, token: str) -> dict:
        """What the page needs: the questions, and the rater's pairs that have no answer, in order."""
        pairs, done = self.raters[token]["pairs"], {row["pair"] for row in self.rows()}
        waiting = [{"id": name, "prompt": pair["prompt"]} for name, pair in pairs.items() if name not in done]
        return {"token": token, "questions": self.questions, "total": len(pairs), "pairs": waiting}

    def add(self, content: bytes) -> None:
        """Commits `Answers`, but of pairs that have one already. Raises ValueError for any that cannot be."""
        given = Answers.model_validate_json(content)
        rater = self.raters.get(given.token, {"name": None, "pairs": ()})
        for pair, answers in given.answers.items():
            if pair not in rater["pairs"] or answers.keys() != self.questions.keys():
                raise ValueError(f"an answer is of a rater's own pair, and to each of {', '.join(self.questions)}")
        rows = [(rater["name"], pair, *each) for pair, answers in given.answers.items() for each in answers.items()]
        with self._lock, self._database:
            insert = "INSERT OR IGNORE INTO answers (rater, pair, dimension, answer) VALUES (?, ?, ?, ?)"
            self._database.executemany(insert, rows)

    def rows(self) -> list[sqlite3.Row]:
        """All answers in their order: rater, pair, dimension, answer, at (when it came, UTC)."""
        with self._lock:
            return self._database.execute("SELECT * FROM answers ORDER BY rowid").fetchall()
