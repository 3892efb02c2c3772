"""The question that VideoAlign is asked about a clip: one text with three tokens in whose place it answers.

``prompt_template.txt`` is KwaiVGI/VideoAlign's (MIT licence), byte for byte: its spaces at the ends of lines are tokens
that the scores depend on.
"""

import functools
from pathlib import Path

REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")  # in the order of DIMENSIONS
VIDEO_TOKEN = "<|video_pad|>"
# prompt_template_type of model_config.json -> file. The second asks the miniature's reward model in few words.
TEMPLATES = {"detailed_special": "prompt_template.txt", "miniature": "prompt_template_miniature.txt"}
_RESERVED = (*REWARD_TOKENS, VIDEO_TOKEN, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def check_prompt(prompt: str) -> None:
    """Raises ValueError for a prompt that contains one of the tokens which structure the question."""
    if reserved := [token for token in _RESERVED if token in prompt]:
        raise ValueError(f"VideoAlign cannot score a prompt with the reserved text {reserved[0]}: {prompt!r}")


def question(prompt: str, num_video_tokens: int, template: str = "detailed_special") -> str:
    """The conversation about a clip of so many tokens, in the words of one of ``TEMPLATES``."""
    check_prompt(prompt)
    text = _template(TEMPLATES[template]).replace("{text_prompt}", prompt)
    return f"{_HEAD}{VIDEO_TOKEN * num_video_tokens}<|vision_end|>{text}{_TAIL}"


@functools.cache
def _template(name: str) -> str:
    with open(Path(__file__).with_name(name), encoding="utf-8", newline="") as file:
        return file.read()
