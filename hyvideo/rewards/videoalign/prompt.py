"""The question of VideoAlign: instructions, the video's prompt, and three reward tokens at which
the scores are read.

``prompt_template.txt`` is KwaiVGI/VideoAlign's (MIT license), byte for byte: the scores depend on
every token of it.
"""

import functools
from pathlib import Path

REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")  # in the order of DIMENSIONS
# prompt_template_type of model_config.json -> file. The miniature's reward model has a short
# prompt.
TEMPLATES = {
    "detailed_special": "prompt_template.txt",
    "miniature": "prompt_template_miniature.txt",
}


def question(prompt: str, template: str = "detailed_special") -> str:
    """Return the text about a video; ``template`` is a key of TEMPLATES."""
    return _template(TEMPLATES[template]).replace("{text_prompt}", prompt)


@functools.cache
def _template(name: str) -> str:
    with open(Path(__file__).with_name(name), encoding="utf-8", newline="") as file:
        return file.read()
