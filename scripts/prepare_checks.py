"""Write yes/no checks of prompts, by a language model behind an OpenAI-compatible endpoint.

    python -m scripts.prepare_checks --prompts_csv in.csv --output_path checks.csv --url https://HOST/v1 --model NAME

The output is a prompts CSV with a column `checks`, for the scorer yes_no. The same command resumes.
Exit code: 0 if all prompts have checks, 2 otherwise.
"""

import os
from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.text import quote


@exit_on_error("prepare_checks.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--prompts_csv", required=True, help="CSV file with a column prompt")
    parser.add_argument(
        "--output_path",
        dest="out",
        required=True,
        type=Path,
        help="CSV file to write, or to complete",
    )
    parser.add_argument("--url", required=True, help="address of the endpoint: https://HOST/v1")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument(
        "--key_env", default="OPENAI_API_KEY", help="variable of the key; '' sends none"
    )
    args = parser.parse_args()

    from hyvideo.data.prompts import read_requests
    from hyvideo.rewards.prompt_checks import INSTRUCTION, CheckWriter

    requests = read_requests(args.prompts_csv)
    if os.path.realpath(args.out) == os.path.realpath(args.prompts_csv):
        raise ValueError(
            f"--output_path must be another file than --prompts_csv, got {quote(args.out)}"
        )
    writer = CheckWriter(
        "prepare_checks",
        INSTRUCTION.read_text(encoding="utf-8"),
        url=args.url,
        model=args.model,
        key_env=args.key_env,
    )
    writer.write(requests, args.out)


if __name__ == "__main__":
    main()
