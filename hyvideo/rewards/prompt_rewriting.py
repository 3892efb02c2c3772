"""Prompt rewriting: a language model turns short prompts into ones like the long captions of the
training videos.
"""

import base64
import io
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from hyvideo.data.files import file_problem, make_folder, read_text, write_problem
from hyvideo.data.images import read_image
from hyvideo.data.prompts import Request, check_prompt, read_requests, write_requests
from hyvideo.data.text import MAX_PROMPT_BYTES, quote
from hyvideo.rewards.chat_endpoint import ChatEndpoint, answer_text

INSTRUCTION = Path(__file__).with_suffix(".txt")
FIELDS = {"temperature": 0.1, "max_tokens": 4096}
MAX_SIDE = 1024  # pixels of the image that is sent
# a reasoning model may be silent for minutes
LIMITS = {"parallel": 8, "timeout": 300, "retries": 4}
ROWS_PER_WRITE = 32


class PromptWriter:
    """A language model that writes a column of a prompts CSV; a subclass names it and defines
    ``read``.
    """

    column: str  # a field of `Request`, None until it is written
    flag = "--output_path"  # of the CSV file
    advice = "start the same command again"  # after a failure
    fallback = False  # whether rows may stay as they are after a failure

    def __init__(self, user: str, instruction: str, *, url: str, model: str, key_env: str):
        self.instruction = instruction
        self.endpoint = ChatEndpoint(user, url=url, model=model, key_env=key_env, **LIMITS)

    def content(self, request: Request) -> str | list[dict]:
        return request.prompt

    def changed(self, request: Request, text: str) -> Request:
        return replace(request, **{self.column: text})

    def write(self, requests: list[Request], path: Path | None = None) -> list[Request]:
        """Return the requests with the column. Raises ValueError for an unusable file or a failure.

        With ``path``, they are also written to this CSV, part by part, and the same call resumes.
        """
        done = list(requests)
        if path and (problem := write_problem(path.parent)):
            raise ValueError(
                f"{self.flag} must be a file in a writable folder, got {quote(path)}: {problem}"
            )
        if path and path.exists():
            done = read_requests(path)
            if [_given(request) for request in done] != [_given(request) for request in requests]:
                raise ValueError(
                    f"{self.flag} must be a new file or have the same prompts, images and seeds, "
                    f"got {quote(path)}"
                )
        elif path:
            make_folder(path.parent)
        problems: list[str] = []
        pending = [row for row, request in enumerate(done) if getattr(request, self.column) is None]
        # writes the file even if no row is pending
        for start in range(0, max(1, len(pending)), ROWS_PER_WRITE):
            rows, known = pending[start : start + ROWS_PER_WRITE], len(problems)
            answers = self.endpoint.ask(
                [partial(self._body, done[row]) for row in rows], self._answer
            )
            for row, (text, reason) in zip(rows, answers):
                if text is None:
                    problems.append(f"no valid answer for {quote(done[row].prompt, 60)}: {reason}")
                else:
                    done[row] = self.changed(done[row], text)
            if path:
                write_requests(path, done)
            if rows and len(problems) - known == len(rows) and not self.fallback:
                break  # such as an endpoint that is down
        if problems and not self.fallback:
            raise ValueError(
                f"{len(problems)} of {len(done)} prompts failed: {problems[0]}; {self.advice}"
            )
        for problem in problems:
            print(problem, file=sys.stderr)
        return done

    def _body(self, request: Request) -> str:
        messages = [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": self.content(request)},
        ]
        return json.dumps({"model": self.endpoint.model, "messages": messages} | FIELDS)

    def _answer(self, choice: dict) -> str:
        """Return what ``read`` makes of an answer without its reasoning; it raises ValueError if it
        is invalid.
        """
        return self.read(answer_text(choice))


class Rewriter(PromptWriter):
    """Rewrites prompts.

    ValueError for an unusable endpoint or file, or a failure that ``fallback`` does not allow.
    """

    column, flag = "original_prompt", "--rewritten_csv"
    advice = f"{PromptWriter.advice}, or add --rewrite_fallback to use such prompts as they are"

    def __init__(self, *, prompt_file: str | Path = INSTRUCTION, fallback: bool, **endpoint: str):
        problem = file_problem(prompt_file)
        if problem:
            raise ValueError(
                f"--rewrite_prompt_file must be a text file, got {quote(prompt_file)}: {problem}"
            )
        instruction = read_text(prompt_file, MAX_PROMPT_BYTES)
        check_prompt(instruction, "in --rewrite_prompt_file")
        super().__init__("--rewrite", instruction, **endpoint)
        self.fallback = fallback

    def content(self, request: Request) -> list[dict]:
        content = [{"type": "text", "text": request.prompt}]
        if request.image:
            image = read_image(request.image)
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            image.save(file := io.BytesIO(), "jpeg", quality=95)
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        return content

    def read(self, text: str) -> str:
        if text.count('"') == 2 and text[0] == text[-1] == '"':
            # quoted text is rendered in the video, which is not meant here
            text = text[1:-1].strip()
        check_prompt(text, "as the answer")
        if not any(character.isalnum() for character in text):
            raise ValueError(f"a prompt must have words, got {quote(text)} as the answer")
        return text

    def changed(self, request: Request, text: str) -> Request:
        return replace(request, prompt=text, original_prompt=request.prompt)


def _given(request: Request) -> tuple[str, str | None, int | None]:
    """Return prompt, image and seed as the user gave them, in a form that a CSV preserves."""
    prompt = (request.original_prompt or request.prompt).strip()
    return prompt, request.image and os.path.realpath(request.image), request.seed
