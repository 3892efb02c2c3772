"""Prompt rewriting: a language model turns short prompts into ones like the long captions of the training videos."""

import base64
import io
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from hyvideo.data.images import read_image
from hyvideo.data.outside import MAX_PROMPT_BYTES, file_problem, make_folder, quote, write_problem
from hyvideo.data.prompts import Request, check_prompt, read_requests, write_requests
from hyvideo.models.chat_endpoint import ChatEndpoint

INSTRUCTION = Path(__file__).with_suffix(".txt")
FIELDS = {"temperature": 0.1, "max_tokens": 4096}
MAX_SIDE = 1024  # pixels of the image that is sent
LIMITS = {"parallel": 8, "timeout": 300, "retries": 4}  # a reasoning model may be silent for minutes
ROWS_PER_WRITE = 32


class Rewriter:
    """Rewrites prompts. ValueError for an unusable endpoint or file, or a failure that ``fallback`` does not allow."""

    def __init__(self, *, url: str, model: str, key_env: str, prompt_file: str | Path = INSTRUCTION, fallback: bool):
        if problem := file_problem(prompt_file, MAX_PROMPT_BYTES):
            raise ValueError(f"--rewrite_prompt_file must be a text file, got {quote(prompt_file)}: {problem}")
        self.instruction = Path(prompt_file).read_text(encoding="utf-8")
        check_prompt(self.instruction, "in --rewrite_prompt_file")
        self.endpoint = ChatEndpoint("--rewrite", url=url, model=model, key_env=key_env, **LIMITS)
        self.fallback = fallback

    def rewrite(self, requests: list[Request], path: Path | None = None) -> list[Request]:
        """Return the requests with rewritten prompts; those with an ``original_prompt`` are returned as they are.

        With ``path``, they are also written to this CSV, part by part, and the same call resumes.
        """
        done = list(requests)
        if path and (problem := write_problem(path.parent)):
            raise ValueError(f"--rewritten_csv must be a file in a writable folder, got {quote(path)}: {problem}")
        if path and path.exists():
            done = read_requests(path)
            if [*map(_given, done)] != [*map(_given, requests)]:
                rule = "must be a new file or have the same prompts, images and seeds"
                raise ValueError(f"--rewritten_csv {rule}, got {quote(path)}")
        elif path:
            make_folder(path.parent)
        for start in range(0, len(done), ROWS_PER_WRITE):
            part = range(start, min(start + ROWS_PER_WRITE, len(done)))
            rows, problems = [row for row in part if done[row].original_prompt is None], []
            answers = self.endpoint.ask([partial(self._body, done[row]) for row in rows], _prompt)
            for row, (prompt, reason) in zip(rows, answers):
                if prompt is None:
                    problems.append(f"{quote(done[row].prompt, 60)} was not rewritten: {reason}")
                else:
                    done[row] = replace(done[row], prompt=prompt, original_prompt=done[row].prompt)
            if path:
                write_requests(path, done)
            if problems and not self.fallback:
                advice = "start the same command again, or add --rewrite_fallback to use such prompts as they are"
                raise ValueError(f"{len(problems)} of {len(done)} prompts failed: {problems[0]}; {advice}")
            for problem in problems:
                print(problem, file=sys.stderr)
        return done

    def _body(self, request: Request) -> str:
        content = [{"type": "text", "text": request.prompt}]
        if request.image:
            image = read_image(request.image)
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            image.save(file := io.BytesIO(), "jpeg", quality=95)
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        messages = [{"role": "system", "content": self.instruction}, {"role": "user", "content": content}]
        return json.dumps({"model": self.endpoint.model, "messages": messages} | FIELDS)


def _given(request: Request) -> tuple[str, str | None, int | None]:
    """Return prompt, image and seed as the user gave them, in a form that a CSV preserves."""
    prompt = (request.original_prompt or request.prompt).strip()
    return prompt, request.image and os.path.realpath(request.image), request.seed


def _prompt(choice: dict) -> str:
    """Return the prompt in a completion, without the reasoning. Raises ValueError for an invalid prompt."""
    text = (choice["message"]["content"] or "").rpartition("</think>")[2].strip()
    if text.count('"') == 2 and text[0] == text[-1] == '"':
        text = text[1:-1].strip()  # quoted text is rendered in the video, which is not meant here
    check_prompt(text, "as the answer")
    return text
