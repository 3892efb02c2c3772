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

from hyvideo.data.images import read_image
from hyvideo.data.prompts import Request, read_requests, write_requests
from hyvideo.files.files import make_folder, read_text, write_problem
from hyvideo.files.text import quote
from hyvideo.files.yaml_files import read_yaml
from hyvideo.rewards.chat_endpoint import ChatEndpoint, answer_text

INSTRUCTION = Path(__file__).with_suffix(".txt")
FIELDS = {"temperature": 0.1, "max_tokens": 4096}
MAX_SIDE = 1024  # pixels of the image that is sent
# a reasoning model may be silent for minutes
LIMITS = {"parallel": 8, "timeout": 300, "retries": 4}
ROWS_PER_WRITE = 32


def read_rewriter(text: str) -> "Rewriter | None":
    """Return the rewriter of the flag ``--rewrite``, a YAML file or JSON with the options of
    `Rewriter`; None for ``false``.
    """
    if text == "false":
        return None
    options = {}  # true: the flag of the original
    try:
        if text.startswith("{"):
            options = json.loads(text)
        elif text != "true":
            options = read_yaml(text)
        return Rewriter(**options)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--rewrite needs a YAML file or JSON with url and model, got {quote(text)}: {error}"
        ) from error


class Rewriter:
    """A language model that rewrites prompts.

    ValueError for an unusable endpoint or file, or a failure that ``fallback`` does not allow.
    """

    def __init__(
        self,
        *,
        url: str,  # and the next two: options of `ChatEndpoint`
        model: str,
        key_env: str = "OPENAI_API_KEY",
        prompt_file: str | Path = INSTRUCTION,
        fallback: bool = False,  # whether prompts may stay as they are after a failure
        csv: str | Path = "",  # file to which the prompts are written, part by part
    ):
        self.instruction = read_text(prompt_file)
        self.endpoint = ChatEndpoint("--rewrite", url=url, model=model, key_env=key_env, **LIMITS)
        self.fallback = fallback
        self.csv = Path(csv) if csv else None

    def write(self, requests: list[Request]) -> list[Request]:
        """Return the requests with rewritten prompts. Raises ValueError for an unusable file or a
        failure.

        With ``csv``, they are also written to this file, part by part, and the same call resumes.
        """
        path = self.csv
        done = list(requests)
        if path:
            done = _started(path, requests)
        problems: list[str] = []
        pending = [row for row, request in enumerate(done) if request.original_prompt is None]
        # writes the file even if no row is pending
        for start in range(0, max(1, len(pending)), ROWS_PER_WRITE):
            rows = pending[start : start + ROWS_PER_WRITE]
            answers = self.endpoint.ask(
                [partial(self._body, done[row]) for row in rows], self._answer
            )
            failed = 0
            for row, (text, reason) in zip(rows, answers):
                request = done[row]
                if text is None:
                    failed += 1
                    problems.append(f"no valid answer for {quote(request.prompt, 60)}: {reason}")
                else:
                    done[row] = replace(request, prompt=text, original_prompt=request.prompt)
            if path:
                write_requests(path, done)
            if rows and failed == len(rows) and not self.fallback:
                break  # such as an endpoint that is down
        if problems and not self.fallback:
            raise ValueError(
                f"{len(problems)} of {len(done)} prompts failed: {problems[0]}; start the same "
                "command again, or set the option fallback to use such prompts as they are"
            )
        for problem in problems:
            print(problem, file=sys.stderr)
        return done

    def _body(self, request: Request) -> str:
        content = [{"type": "text", "text": request.prompt}]
        for place, path in enumerate(request.images):
            image = read_image(path)
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            file = io.BytesIO()
            image.save(file, "jpeg", quality=95)
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.insert(place, {"type": "image_url", "image_url": {"url": url}})
        messages = [
            {"role": "system", "content": self.instruction},
            {"role": "user", "content": content},
        ]
        return json.dumps({"model": self.endpoint.model, "messages": messages} | FIELDS)

    def _answer(self, choice: dict) -> str:
        """Return the prompt in an answer without its reasoning. Raises ValueError if it is
        invalid.
        """
        text = answer_text(choice)
        if text.count('"') == 2 and text[0] == text[-1] == '"':
            # quoted text is rendered in the video, which is not meant here
            text = text[1:-1].strip()
        if not any(character.isalnum() for character in text):
            raise ValueError(f"a prompt must have words, got {quote(text)} as the answer")
        return text


def _started(path: Path, requests: list[Request]) -> list[Request]:
    """Return the requests in the file of an earlier call, or the given ones if there is none.

    Raises ValueError if the file cannot be written, or has other prompts.
    """
    problem = write_problem(path.parent)
    if problem:
        raise ValueError(
            f"csv of --rewrite must be a file in a writable folder, got {quote(path)}: {problem}"
        )
    if not path.exists():
        make_folder(path.parent)
        return list(requests)
    done = read_requests(path)
    if [_given(request) for request in done] != [_given(request) for request in requests]:
        raise ValueError(
            "csv of --rewrite must be a new file or have the same prompts, images and seeds, got "
            f"{quote(path)}"
        )
    return done


def _given(request: Request) -> tuple[str, list[str], int | None]:
    """Return prompt, images and seed as the user gave them, in a form that a CSV preserves."""
    prompt = (request.original_prompt or request.prompt).strip()
    return prompt, [os.path.realpath(image) for image in request.images], request.seed
