"""What models behind an official SDK share: one policy of retries, one hard end, one table of errors.

The SDKs' own retries are switched off, because `kilburn.models.retry` does them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from kilburn.errors import MissingExtra, ModelError, Refused, ToolsRefused, Unavailable
from kilburn.model import Delta, Reply, Request
from kilburn.models.provider_errors import provider_error
from kilburn.models.retry import Retry


class Deadline:
    """Shuts a socket after a number of seconds, unless the block ends first.

    Args:
        seconds: seconds from the start of the block, or None for no limit.
        source: an httpx2 response, whose socket is shut.
    """

    def __init__(self, seconds: float | None, source: Any) -> None:
        self.passed = False
        self._source = source
        self._timer = None if seconds is None else threading.Timer(seconds, self._shut)
        if self._timer is not None:
            self._timer.daemon = True

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _shut(self) -> None:
        self.passed = True
        stream = self._source.extensions.get("network_stream")
        wire = None if stream is None else stream.get_extra_info("socket")
        if wire is not None:
            # The peer has already closed the socket.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


class Collector(Protocol):
    """Takes the chunks of one stream in order and ends with a reply."""

    def feed(self, chunk: dict[str, Any], /) -> Iterator[Delta]:
        """Yield the pieces of text that a chunk brings."""
        ...

    def reply(self) -> Reply:
        """Return the whole reply.

        Raises:
            Unavailable: the stream ended before the reply did, or it is no message.
        """
        ...


class SdkClient:
    """What speaks to an endpoint through an SDK.

    Args:
        sdk: the module to import, which is also the extra that brings it.
        name: the model's name there.
        timeout: seconds of silence before a call is given up.
        retry: how failed calls are made again; None as `Retry` does by itself.

    Raises:
        MissingExtra: the SDK is not installed.
    """

    elsewhere = True
    """It computes on another machine: a program that ends need not wait for it."""
    _client: Any

    def __init__(self, sdk: str, name: str, timeout: float, retry: Retry | None) -> None:
        try:
            self._sdk = import_module(sdk)
            self._network_error = import_module("httpx2").HTTPError
        except ModuleNotFoundError as error:
            raise MissingExtra(sdk, sdk) from error
        self.name = name
        self._timeout = timeout
        self._retry = retry or Retry()

    def _openai(self, base_url: str | None, api_key: str | None) -> Any:
        """Return a client of OpenAI's SDK. Raises `Refused` without a key."""
        try:
            return self._sdk.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        except self._sdk.OpenAIError as error:
            if base_url is not None and api_key is None:
                # A local server asks for no key, but the SDK requires one.
                return self._sdk.OpenAI(base_url=base_url, api_key="none", max_retries=0)
            raise Refused(f"{self.name}: {error}", advice="set OPENAI_API_KEY, or give api_key") from error

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _translate_error(self, error: Any, passed: bool) -> ModelError:
        silent = any(base.__name__ == "TimeoutException" for base in type(error).__mro__)
        if passed or silent or isinstance(error, self._sdk.APITimeoutError):
            return self._late_error()
        if isinstance(error, self._network_error | self._sdk.APIConnectionError):
            reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            return Unavailable(f"{self.name}: {reason}", advice=f"is anything listening at {self._client.base_url}?")
        status = getattr(error, "status_code", None)
        headers = error.response.headers if isinstance(error, self._sdk.APIStatusError) else None
        # An error inside a stream carries the stream's own status, which says nothing.
        return provider_error(self.name, None if status == 200 else status, error.body, str(error), headers)

    def _late_error(self) -> Unavailable:
        return Unavailable(f"{self.name}: no whole reply in time", advice="give it more time, or ask for a shorter reply")


class SdkModel(SdkClient, ABC):
    """A model behind an SDK.

    Args:
        sdk, name, timeout, retry: see `SdkClient`; `Request.timeout` bounds the whole reply.
        context: its window in tokens, or None where unknown.
        tokenizer: a name for `kilburn.tokens`, or a counter.

    Raises:
        MissingExtra: the SDK is not installed.
    """

    form: str
    takes_tools = True
    """False once the endpoint has refused a request because of its tools; see `kilburn.model.takes_tools`."""
    _answer: ClassVar[str]
    """What the endpoint sends, in words."""

    def __init__(self, sdk: str, name: str, context: int | None, tokenizer: Any, timeout: float, retry: Retry | None) -> None:
        super().__init__(sdk, name, timeout, retry)
        self.context = context
        self.tokenizer: Any = tokenizer

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the reply as it comes. Failures before the first piece are tried again.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        yield from self._retry.stream(lambda seconds: self._once(request, seconds), request.timeout)

    @abstractmethod
    def _open(self, request: Request, silence: float) -> Any:
        """Return the SDK's stream of a request, given up after so many seconds of silence."""

    @abstractmethod
    def _collector(self) -> Collector:
        """Return what makes one reply of a stream's chunks."""

    def _once(self, request: Request, seconds: float | None) -> Generator[Delta | Reply, None, None]:
        """Send the request once, and yield its reply; it may take `seconds`, or any time if that is None."""
        silence = self._timeout if seconds is None else min(seconds, self._timeout)
        collector = self._collector()
        passed = False
        try:
            with self._open(request, silence) as chunks, Deadline(seconds, chunks.response) as deadline:
                try:
                    for chunk in chunks:
                        yield from collector.feed(chunk.to_dict(warnings=False))
                finally:
                    passed = deadline.passed
        except (self._sdk.APIError, self._network_error) as error:
            typed = self._translate_error(error, passed)
            self.takes_tools = self.takes_tools and not isinstance(typed, ToolsRefused)
            raise typed from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.name} sent what is no {self._answer}: {error!r}", advice="check the base URL") from error
        if passed:
            raise self._late_error()
        yield collector.reply()
