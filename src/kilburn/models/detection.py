"""Finds a model where the user named none: a provider whose key is set, or a model server on this machine.

Only the list of models is requested, with a short timeout. No prompt is sent.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

SERVERS = "KILBURN_MODEL_SERVERS"
"""Environment variable: base URLs of the servers to ask, separated by commas; empty for none."""
DEFAULT_SERVERS = "http://127.0.0.1:11434/v1,http://127.0.0.1:8080/v1,http://127.0.0.1:8000/v1"
"""Ollama, llama.cpp's server and vLLM at their default ports."""

OPENAI_MODEL = "gpt-5.5"
ANTHROPIC_MODEL = "claude-sonnet-5-5"

PATIENCE = 1.0
"""Seconds to wait for each part of a server's list of models."""
MAX_LIST_BYTES = 1 << 20

_NO_CHAT = re.compile(r"embed|rerank|minilm|\bbge\b|whisper|tts|dall-e|moderation", re.IGNORECASE)
"""Names of models that do not hold conversations."""


class DetectedModel(NamedTuple):
    """A model that can be used here.

    Args:
        spec: its spec, such as "chat('gpt-5.5')".
        name: its name at the provider or server.
        reason: why it was chosen, as a clause.
    """

    spec: str
    name: str
    reason: str


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


def detect(environment: Mapping[str, str] = os.environ, *, patience: float = PATIENCE) -> DetectedModel | None:
    """Return the first model of: OpenAI if OPENAI_API_KEY is set, Anthropic if ANTHROPIC_API_KEY is set, a local server.

    With OPENAI_BASE_URL, a model that the server there lists is chosen. A server that does not list models in OpenAI's form
    within `patience` seconds is ignored.

    Args:
        environment: variables; `SERVERS` replaces the local servers.
        patience: seconds to wait for each part of a list of models.
    """
    if key := environment.get("OPENAI_API_KEY"):
        base_url = environment.get("OPENAI_BASE_URL")
        names = chat_models(base_url, key, patience=patience) if base_url else []
        name = OPENAI_MODEL if OPENAI_MODEL in names or not names else names[0]
        return DetectedModel(f"chat({name!r})", name, "OPENAI_API_KEY is set")
    if environment.get("ANTHROPIC_API_KEY"):
        return DetectedModel(f"messages({ANTHROPIC_MODEL!r})", ANTHROPIC_MODEL, "ANTHROPIC_API_KEY is set")
    for url in filter(None, environment.get(SERVERS, DEFAULT_SERVERS).split(",")):
        if names := chat_models(url, patience=patience):
            spec = f"chat({names[0]!r}, base_url={url!r}, api_key='none')"
            return DetectedModel(spec, names[0], f"the server at {url} has it")
    return None


def chat_models(base_url: str, key: str = "none", *, patience: float = PATIENCE) -> list[str]:
    """Return the names of the chat models that a server lists, or an empty list if it is not an OpenAI-compatible server."""
    import http.client  # with ssl: many commands import this module, and few ask a server

    url = urlsplit(base_url)
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    deadline = time.monotonic() + 2 * patience
    body = b""
    try:
        connection = connect(url.hostname or "", url.port, timeout=patience)
        try:
            connection.request("GET", f"{url.path.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            # An endless answer would be read for ever.
            while response.status == http.HTTPStatus.OK and time.monotonic() < deadline:
                piece = response.read1(MAX_LIST_BYTES - len(body))
                body += piece
                if not piece:
                    break
        finally:
            connection.close()
        listed = msgspec.json.decode(body, type=_ModelList).data
    except (OSError, http.client.HTTPException, ValueError):
        return []
    return [model.id for model in listed if not _NO_CHAT.search(model.id)]
