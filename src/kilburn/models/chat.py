"""Any endpoint that speaks OpenAI's chat completions: OpenAI, vLLM, Ollama, llama.cpp's server, a gateway.

It goes through the official `openai` SDK, whose own retries are switched off so that there is one
policy (see `kilburn.models.retry`). It refuses to know one server from another, with one exception:
OpenAI itself wants the cap of the reply under a newer name.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import Any

from kilburn.errors import MissingExtra, ModelError, Refused, Unavailable
from kilburn.model import Delta, Reply, Request
from kilburn.models.assembly import Assembly, arguments
from kilburn.models.deadline import Deadline
from kilburn.models.provider_errors import error_of
from kilburn.models.retry import Retry

__all__ = ["Chat"]


class Chat:
    """A model behind a chat-completions endpoint.

    Args:
        model: its name there.
        base_url: of the endpoint, with its version ("http://127.0.0.1:8000/v1"); None is OpenAI, or
            what OPENAI_BASE_URL says.
        api_key: None takes OPENAI_API_KEY; a `base_url` that needs none may go without.
        context: its window in tokens, or None where unknown.
        tokenizer: a name for `kilburn.tokens`, or a counter; None takes the model's name.
        timeout: seconds of silence before a call is given up; `Request.timeout` bounds the whole reply.
        retry: how failed calls are made again.

    Raises:
        MissingExtra: the extra `openai` is not installed.
        Refused: no key.
    """

    form = "chat"

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
        try:
            self._sdk = importlib.import_module("openai")
        except ModuleNotFoundError as error:
            raise MissingExtra("openai", "openai") from error
        self.name = model
        self.context = context
        self.tokenizer: Any = model if tokenizer is None else tokenizer
        self._timeout = timeout
        self._retry = retry or Retry()
        self._client = self._connect(base_url, api_key)
        self._cap = "max_completion_tokens" if self._client.base_url.host == "api.openai.com" else "max_tokens"

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply as it comes. Failures before the first piece are tried again.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        yield from self._retry.stream(lambda left: self._once(request, left), request.timeout)

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._client.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self, base_url: str | None, api_key: str | None) -> Any:
        try:
            return self._sdk.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        except self._sdk.OpenAIError as error:
            if base_url is not None and api_key is None:
                # Servers at home ask for no key, but the SDK insists on one.
                return self._sdk.OpenAI(base_url=base_url, api_key="none", max_retries=0)
            raise Refused(f"{self.name}: {error}", advice="set OPENAI_API_KEY, or give api_key") from error

    def _once(self, request: Request, left: float | None) -> Generator[Delta | Reply, None, None]:
        """One try, within `left` seconds."""
        silence = self._timeout if left is None else min(left, self._timeout)
        assembly = Assembly(self.name)
        passed = False
        try:
            with (
                self._client.chat.completions.create(
                    model=self.name,
                    messages=list(request.messages),
                    stream=True,
                    stream_options={"include_usage": True},
                    timeout=silence,
                    extra_body=request.options or None,
                    **{self._cap: request.max_tokens},
                    **arguments(request),
                ) as chunks,
                Deadline(left, chunks.response) as deadline,
            ):
                try:
                    for chunk in chunks:
                        yield from assembly.feed(chunk.to_dict(warnings=False))
                finally:
                    passed = deadline.passed
        except self._sdk.APIError as error:
            raise self._error_of(error, passed) from error
        except (AttributeError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.name} sent what is no chat completion: {error}", advice="check the base URL") from error
        if passed:
            raise self._late_error()
        yield assembly.reply()

    def _error_of(self, error: Any, passed: bool) -> ModelError:
        if passed or isinstance(error, self._sdk.APITimeoutError):
            return self._late_error()
        if isinstance(error, self._sdk.APIConnectionError):
            reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            return Unavailable(f"{self.name}: {reason}", advice=f"is anything listening at {self._client.base_url}?")
        headers = error.response.headers if isinstance(error, self._sdk.APIStatusError) else None
        return error_of(self.name, getattr(error, "status_code", None), error.body, str(error), headers)

    def _late_error(self) -> Unavailable:
        return Unavailable(f"{self.name}: no whole reply in time", advice="give it more time, or ask for a shorter reply")
