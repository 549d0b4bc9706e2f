"""Anthropic's messages endpoint, and other servers with its form.

It uses the official `anthropic` SDK. The SDK's own retries are switched off, because `kilburn.models.retry` does
them. Requests with `context_management`,
`compaction` or a compaction block go to the SDK's beta endpoint with the headers that they need.
"""

from __future__ import annotations

from typing import Any

from kilburn.errors import Refused, WireError
from kilburn.model import Request
from kilburn.models.hosted import SdkModel
from kilburn.models.retry import Retry
from kilburn.wire.compaction import betas_for
from kilburn.wire.messages import request_fields
from kilburn.wire.messages_stream import ReplyBlocks

__all__ = ["Messages"]


class Messages(SdkModel):
    """A model behind a messages endpoint.

    Args:
        model: its name there.
        base_url: of the endpoint, without its version; None is Anthropic, or what ANTHROPIC_BASE_URL says.
        api_key: None takes what the SDK finds (ANTHROPIC_API_KEY); a `base_url` that needs none may go without.
        context: its window in tokens, or None if unknown.
        cache: mark the system prompt and the ends of the last two messages for the provider's prompt cache.
        timeout: seconds of silence before a call is given up; `Request.timeout` bounds the whole reply.
        retry: how failed calls are repeated.

    Raises:
        MissingExtra: the extra `anthropic` is not installed.
    """

    form = "messages"
    _answer = "message"

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        context: int | None = None,
        cache: bool = False,
        timeout: float = 300.0,
        retry: Retry | None = None,
    ) -> None:
        super().__init__("anthropic", model, context, model, timeout, retry)
        self._cache = cache
        self._client = self._sdk.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
        if base_url is not None and not (self._client.api_key or self._client.auth_token):
            # A local server asks for no key, but the SDK requires one.
            self._client = self._client.copy(api_key="none")

    def _open(self, request: Request, silence: float) -> Any:
        try:
            betas = betas_for(request.options, request.messages)
        except WireError as error:
            raise Refused(f"{self.name}: {error.what}", advice=error.advice) from error
        fields = request_fields(self.name, request, cache=self._cache)
        endpoint = self._client.beta.messages if betas else self._client.messages
        try:
            return endpoint.create(stream=True, timeout=silence, **fields, **({"betas": betas} if betas else {}))
        except TypeError as error:
            raise Refused(f"{self.name}: {error}", advice="set ANTHROPIC_API_KEY, or give api_key") from error

    def _collector(self) -> ReplyBlocks:
        return ReplyBlocks(self.name)
