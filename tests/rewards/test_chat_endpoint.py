"""Tests of the client of a chat endpoint that need no server."""

import base64

import pytest

from hyvideo.rewards.chat_endpoint import without_key

KEY = "sk-proj-Ab3dEf9hIjKlMnOpQrSt"


@pytest.mark.parametrize(
    "echo",
    [
        KEY,
        KEY[::-1],
        KEY.upper(),
        KEY[3:14],
        " ".join(KEY),
        f"{KEY[:12]} ... {KEY[12:]}",
        KEY.encode().hex(),
        base64.b64encode(KEY.encode()).decode(),
        base64.b64encode(f"Bearer {KEY}".encode()).decode(),
        base64.b64encode(f"key={KEY};".encode()).decode(),
        base64.b64encode(KEY[::-1].encode()).decode(),
    ],
)
def test_a_key_that_an_endpoint_repeats_is_not_shown_in_any_form(echo):
    shown = without_key(f"status 401: invalid key {echo}, see the manual", KEY)
    assert shown.startswith("status 401: invalid key ") and shown.endswith(", see the manual")
    echoed = shown.removeprefix("status 401: invalid key ").removesuffix(", see the manual")
    # at most the ends, such as the base64 of "Bearer "
    assert "***" in echoed and len(echoed) <= 16


def test_a_short_key_is_hidden_as_a_whole():
    assert without_key("invalid key abc", "abc") == "invalid key ***"


@pytest.mark.parametrize("key", ["", "abc", KEY])
def test_other_messages_are_not_changed(key):
    message = (
        "https://api.example.com/v1/chat/completions: status 503: the model is overloaded, try "
        "again in 20 s"
    )
    assert without_key(message, key) == message
