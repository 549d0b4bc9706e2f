"""vLLM's OpenAI endpoint, used so that its prefix cache is hit: stable prefixes, a salt per tenant, metrics.

vLLM keeps the KV of full blocks of tokens, and finds them by a hash of all tokens from the start (PagedAttention,
arXiv 2309.06180; vLLM's design note "Automatic Prefix Caching"). So after one changed letter early in a prompt,
everything is prefilled again. This model sends the same tools in the same order always, adds nothing of its own to a
prompt, and says after each reply how much of the previous prompt was reused. Requests of a tenant carry a salt, which
goes into the hashes. So no tenant is served from another's cache, or can learn from response times what is in it.
Nothing inside a server can be moved or evicted: vLLM has no call for that.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Annotated, Any

import msgspec

from kilburn.errors import ModelError, Refused, SpecError
from kilburn.model import Delta, Reply, Request
from kilburn.models.chat import Chat
from kilburn.models.retry import Retry
from kilburn.wire import chat
from kilburn_kv.vllm_metrics import VllmMetrics, read_metrics

__all__ = ["Vllm", "salt_of"]

log = logging.getLogger("kilburn")

SECRET = "KILBURN_CACHE_SECRET"
"""The environment variable with the secret from which salts are made."""

_SECRET_LETTERS = 16
_PATIENCE = 30.0
"""Seconds to wait for metrics and for a prompt's tokens."""

_ABSENT = {404, 405, 501}
_SHAPING = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
)
"""Options of a request that change the prompt's tokens; all others only change the reply."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("default", "const", "enum", "examples", "required")


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is a prefix that it shares with the previous prompt.

    Args:
        unit: "characters" of the request as JSON with sorted keys, or "tokens" as the server counts them.
        previous: length of the previous prompt; 0 for a first prompt.
        length: of this prompt.
        common: what the two share from the start.
        change: the first place that differs ("options", "tools", "messages[3]"; or "template" if only the server's
            chat template renders the same messages differently), or None if the earlier part is unchanged.
        reusable: tokens, in full blocks, that need not be prefilled again if they are still cached. It is a lower
            bound, because the server also keeps what it generated. None if unknown.
        cached: tokens that the server says were cached; None before the reply. It is 0 for a server without
            `--enable-prompt-tokens-details`, which does not report it.
    """

    unit: str
    previous: int
    length: int
    common: int
    change: str | None = None
    reusable: int | None = None
    cached: int | None = None

    @property
    def lost(self) -> int:
        """The part of the previous prompt that cannot be reused: everything from the first difference on."""
        return self.previous - self.common


class Vllm(Chat):
    """A model behind vLLM's server, for one process of one tenant; see `fork` for others.

    Args:
        model: its name there.
        base_url: of the server, with or without "/v1".
        api_key: of a server that was started with one; None takes VLLM_API_KEY, and never OPENAI_API_KEY.
        tenant: whose requests these are. Only requests of the same tenant and secret share cached prefixes; None
            shares with all requests without a salt.
        secret: the salt is made from it and the tenant; at least 16 characters. None takes KILBURN_CACHE_SECRET.
            Users who can send their own requests must not know it.
        context: its window in tokens, or None if unknown.
        retry: how failed calls are repeated.

    Raises:
        MissingExtra: the extra `openai` is not installed.
        SpecError: a tenant without a secret, or one that is too short.
    """

    def __init__(
        self,
        model: str,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        tenant: str | None = None,
        secret: str | None = None,
        context: int | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._salt = None if tenant is None else salt_of(tenant, os.environ.get(SECRET, "") if secret is None else secret)
        # Replaced as a whole, so that threads never see half of it.
        self._last: tuple[_Sections, Prefix | None] = ((), None)
        # Without a key the SDK would take OpenAI's from the environment, and hand it to this server.
        key = api_key or os.environ.get("VLLM_API_KEY") or "none"
        super().__init__(model, f"{self._root}/v1", key, context=context, retry=retry)

    @property
    def prefix(self) -> Prefix | None:
        """The comparison of the last answered prompt with the one before it, in characters; None before the first."""
        return self._last[1]

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply as it comes. From its first piece on, `prefix` is about this prompt.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
        """
        request = self._stable_request(request)
        sections = _sections(request)
        prefix = _compare(self._last[0], sections)
        begun = False
        with closing(super().stream(request)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                if not begun:
                    begun = True
                    self._last = (sections, prefix)
                    _log_change(self.name, prefix)
                if isinstance(piece, Reply) and piece.usage is not None:
                    self._last = (sections, msgspec.structs.replace(prefix, cached=piece.usage.cached))
                yield piece

    def preview(self, request: Request) -> Prefix:
        """How much of the last prompt this request would reuse, in tokens; nothing is generated.

        The server renders and counts both prompts, so this is exact, except for `documents` and `reasoning_effort`,
        which its tokenizer endpoint does not accept.

        Raises:
            Refused: the server has no /tokenize, or does not accept the request.
            Unavailable: see `kilburn.errors`.
        """
        sections = _sections(self._stable_request(request))
        before = self._last[0]
        tokens, old = self._tokens(sections), self._tokens(before) if before else ()
        common = _common_length(old, tokens)
        change = _first_change(before, sections)
        if change is None and common < len(old):
            change = "template"
        block = self._block()
        # The last token of a prompt is always computed, to get the next one.
        reusable = None if block is None else min(common, len(tokens) - 1) // block * block
        return Prefix(unit="tokens", previous=len(old), length=len(tokens), common=common, change=change, reusable=reusable)

    def metrics(self) -> VllmMetrics:
        """The server's current /metrics.

        Raises:
            Refused: there is no such page, or it has no metrics of vLLM.
            Unavailable: the server does not respond.
        """
        found = read_metrics(self._ask("/metrics"))
        if not found.found:
            raise Refused(f"{self._root}/metrics has nothing of vLLM's", advice="is this a vLLM, with its statistics on?")
        return found

    def fork(self) -> Vllm:
        """The same model for another process. Its `prefix` starts from this one's last prompt.

        Both share the connections: closing one closes all.
        """
        return copy.copy(self)

    def _stable_request(self, request: Request) -> Request:
        """The request with its tools in one order and its tenant's salt."""
        options = request.options
        if self._salt is not None:
            if "cache_salt" in options:
                raise Refused(f"{self.name}: a cache_salt in the options of a tenant", advice="leave it to the model")
            options = {**options, "cache_salt": self._salt}
        tools = sorted(
            (msgspec.structs.replace(tool, parameters=_sort_keywords(tool.parameters)) for tool in request.tools),
            key=lambda tool: tool.name,
        )
        return msgspec.structs.replace(request, tools=tuple(tools), options=options)

    def _block(self) -> int | None:
        try:
            return self.metrics().block
        except Refused:
            # A gateway may hide the metrics; the tokens are useful without them.
            return None

    def _tokens(self, sections: _Sections) -> tuple[int, ...]:
        """The tokens of a prompt, as the server renders it."""
        options, tools, *messages = (msgspec.json.decode(text) for _, text in sections)
        body = {"model": self.name, "messages": messages, **options, **({"tools": tools} if tools else {})}
        body.pop("tool_choice", None)
        said = self._ask("/tokenize", body)
        try:
            return msgspec.json.decode(said, type=_Tokenized).tokens
        except msgspec.DecodeError as error:
            raise Refused(f"{self._root}/tokenize sent no tokens: {error}", advice="is this a vLLM?") from error

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The response of an endpoint outside the API; a GET, or a POST of `body`."""
        options = {"timeout": _PATIENCE}
        url = self._root + path
        try:
            said: str = (
                self._client.get(url, cast_to=str, options=options)
                if body is None
                else self._client.post(url, cast_to=str, body=body, options=options)
            )
        except self._sdk.APIError as error:
            raise self._translate_error(error, False) from error
        return said

    def _translate_error(self, error: Any, passed: bool) -> ModelError:
        path = error.request.url.path
        if getattr(error, "status_code", None) in _ABSENT and path.endswith(("/metrics", "/tokenize")):
            return Refused(f"{self._root} has no {path}", advice="is this a vLLM, with that endpoint on?")
        return super()._translate_error(error, passed)


_Sections = tuple[tuple[str, str], ...]
"""A prompt as (name, JSON) in the order in which templates write it: options, tools, each message."""


class _Tokenized(msgspec.Struct):
    tokens: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]


def _compare(before: _Sections, sections: _Sections) -> Prefix:
    """How a prompt begins like the one before it, in characters."""
    common = 0
    for (_, old), (_, new) in zip(before, sections, strict=False):
        if old != new:
            common += _common_length(old, new)
            break
        common += len(new)
    return Prefix(
        unit="characters",
        previous=sum(len(text) for _, text in before),
        length=sum(len(text) for _, text in sections),
        common=common,
        change=_first_change(before, sections),
    )


def salt_of(tenant: str, secret: str) -> str:
    """The `cache_salt` of a tenant: HMAC-SHA256 under the secret, in hex. The tenant cannot be read or guessed from it.

    Raises:
        SpecError: a secret of less than 16 characters.
    """
    if len(secret) < _SECRET_LETTERS:
        raise SpecError(
            f"a tenant's salt needs a secret of at least {_SECRET_LETTERS} characters", advice=f"set {SECRET}, or give secret"
        )
    return hmac.new(secret.encode(), b"kilburn.vllm\0" + tenant.encode(), hashlib.sha256).hexdigest()


def _sort_keywords(schema: Any, *, named: bool = False) -> Any:
    """A JSON schema with its keywords sorted. Properties stay in their order: models write arguments in it."""
    if isinstance(schema, list):
        return [_sort_keywords(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _sort_keywords(inner) for name, inner in schema.items()}
    return {key: schema[key] if key in _DATA else _sort_keywords(schema[key], named=key in _NAMED) for key in sorted(schema)}


def _sections(request: Request) -> _Sections:
    options = {key: request.options[key] for key in _SHAPING if key in request.options}
    given = [("options", options), ("tools", chat.tools(request.tools))]
    given += [(f"messages[{index}]", message) for index, message in enumerate(request.messages)]
    try:
        # Tools are as they will be sent; the order of a message's keys never reaches the prompt.
        return tuple(
            (name, msgspec.json.encode(value, order=None if name == "tools" else "sorted").decode()) for name, value in given
        )
    except (TypeError, ValueError) as error:
        raise Refused(f"a request that is no JSON: {error}", advice="send strings, numbers, lists and dicts") from error


def _first_change(before: _Sections, after: _Sections) -> str | None:
    """The first section of the previous prompt that differs in this one; None if all are the same."""
    for index, section in enumerate(before):
        if index >= len(after) or after[index] != section:
            return section[0]
    return None


def _common_length(before: Sequence[Any], after: Sequence[Any]) -> int:
    """How many items two sequences share from the start."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _log_change(who: str, prefix: Prefix) -> None:
    if prefix.change is not None:
        log.info(
            "%s: the prompt changed at %s: %d of the %d characters before it are read again or gone",
            who,
            prefix.change,
            prefix.lost,
            prefix.previous,
        )
