"""The prompt of VideoAlign: instructions, the video's prompt, and three reward tokens at which the
scores are read.

``prompt_template.txt`` is KwaiVGI/VideoAlign's (MIT license), byte for byte: the scores depend on
every token of it.
"""

import functools
from pathlib import Path

REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")  # in the order of DIMENSIONS
VIDEO_TOKEN = "<|video_pad|>"
# prompt_template_type of model_config.json -> file. The miniature's reward model has a short
# prompt.
TEMPLATES = {
    "detailed_special": "prompt_template.txt",
    "miniature": "prompt_template_miniature.txt",
}
_HEAD = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"


def question(prompt: str, num_video_tokens: int, template: str = "detailed_special") -> str:
    """Return the model's text input for a video of ``num_video_tokens`` tokens; ``template`` is a
    key of TEMPLATES.
    """
    text = _template(TEMPLATES[template]).replace("{text_prompt}", prompt)
    return f"{_HEAD}{VIDEO_TOKEN * num_video_tokens}<|vision_end|>{text}{_TAIL}"


@functools.cache
def _template(name: str) -> str:
    with open(Path(__file__).with_name(name), encoding="utf-8", newline="") as file:
        return file.read()
