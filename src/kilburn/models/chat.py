"""Any endpoint that speaks OpenAI's chat completions: OpenAI, vLLM, Ollama, llama.cpp's server, a gateway.

It uses the official `openai` SDK. All servers are treated alike, with one exception: OpenAI itself wants the cap of the
reply under a newer name.
"""

from __future__ import annotations

from typing import Any

from kilburn.model import Request
from kilburn.models.hosted import SdkModel
from kilburn.models.retry import Retry
from kilburn.wire.chat import request_fields
from kilburn.wire.chat_stream import Assembly

__all__ = ["Chat"]


class Chat(SdkModel):
    """A model behind a chat-completions endpoint.

    Args:
        model: its name there.
        base_url: of the endpoint, with its version ("http://127.0.0.1:8000/v1"); None is OpenAI, or
            what OPENAI_BASE_URL says.
        api_key: None takes OPENAI_API_KEY; a `base_url` that needs none may go without.
        context: its window in tokens, or None if unknown.
        tokenizer: a name for `kilburn.tokens`, or a counter; None takes the model's name.
        timeout: seconds of silence before a call is given up; `Request.timeout` bounds the whole reply.
        retry: how failed calls are repeated.

    Raises:
        MissingExtra: the extra `openai` is not installed.
        Refused: no key.
    """

    form = "chat"
    _answer = "chat completion"

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        context: int | None = None,
        tokenizer: Any = None,
        timeout: float = 300.0,
        retry: Retry | None = None,
    ) -> None:
        super().__init__("openai", model, context, model if tokenizer is None else tokenizer, timeout, retry)
        self._client = self._openai(base_url, api_key)

    def _open(self, request: Request, silence: float) -> Any:
        fields = request_fields(self.name, request, self._client.base_url.host)
        return self._client.chat.completions.create(timeout=silence, extra_body=request.options or None, **fields)

    def _collector(self) -> Assembly:
        return Assembly(self.name)
