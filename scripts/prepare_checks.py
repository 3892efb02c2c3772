"""Write yes/no checks of prompts, by a language model behind an OpenAI-compatible endpoint.

    python -m scripts.prepare_checks --prompts_csv in.csv --output_path checks.csv --url https://HOST/v1 --model NAME

The output has the columns of the input and a column `checks`, for the scorer yes_no and as a prompts CSV. The same
command resumes. Exit code: 0 if all prompts have checks, 2 otherwise.
"""

from pathlib import Path

from hyvideo.data.outside import Parser, exit_on_error, find_path, quote, write_problem


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--prompts_csv", required=True, help="CSV file with a column prompt")
    parser.add_argument("--output_path", dest="out", required=True, type=Path, help="CSV file to write, or to complete")
    parser.add_argument("--url", required=True, help="address of the endpoint: https://HOST/v1")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--key_env", default="OPENAI_API_KEY", help="variable of the key; '' sends none")
    args = parser.parse_args()

    from hyvideo.data.prompts import read_requests, read_rows
    from hyvideo.models.chat_endpoint import ChatEndpoint
    from hyvideo.models.prompt_checks import prepare_checks
    from hyvideo.models.prompt_rewriting import LIMITS

    with exit_on_error("prepare_checks.py"):
        if problem := write_problem(args.out.parent):
            raise ValueError(f"--output_path must be a file in a writable folder, got {quote(args.out)}: {problem}")
        source = args.out if args.out.exists() else args.prompts_csv
        if [r.prompt for r in read_requests(source)] != [r.prompt for r in read_requests(args.prompts_csv)]:
            raise ValueError(f"--output_path must be a new file or have the same prompts, got {quote(args.out)}")
        endpoint = ChatEndpoint("prepare_checks", url=args.url, model=args.model, key_env=args.key_env, **LIMITS)
        prepare_checks(read_rows(find_path(source)), args.out, endpoint)


if __name__ == "__main__":
    main()
