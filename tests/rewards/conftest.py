"""An endpoint of a language model, for judges and prompt writers."""

import pytest

from tests.rewards.chat_server import endpoints


@pytest.fixture
def endpoint():
    with endpoints() as start:
        yield start
