"""Errors as clients expect them: the provider's own form, by route. None of them names a file of this machine."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kilburn.errors import (
    EmptyPrompt,
    Forgotten,
    InvalidBudget,
    KernelError,
    KilburnError,
    LawBroken,
    ModelError,
    SpecError,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreStale,
    StoreUnavailable,
    UnknownAddress,
    WireError,
)

OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
VERSIONED = re.compile(r"/(v\d[a-z0-9]*|openai)(/|$)")
"""A part of a path that only base URLs of OpenAI's API have: to Anthropic's the SDK adds the version itself."""

ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

STORE: dict[type[StoreError], tuple[str, str]] = {
    StoreFull: ("store-full", "the gateway's disk is full, and nothing of this was kept; try again later"),
    StoreBusy: ("store-busy", "another program holds the gateway's store; try again"),
    StoreStale: ("store-changed", "the session changed meanwhile; ask again"),
    StoreCorrupt: ("store-damaged", "the gateway's store is damaged; its operator mends it with `kilburn fsck`"),
    StoreReadOnly: ("store-read-only", "the gateway's store cannot be written; its operator checks its permissions"),
    StoreUnavailable: ("store-unavailable", "the gateway's store cannot be reached; try again"),
    StoreError: ("store-failed", "the gateway's store cannot be used; try again later"),
}
"""For each error of the store: a reason in one word, and what a client is told. What SQLite says has the file's path."""

_FILE = re.compile(r"(?<![\w/:.~])~?/(?!v\d)(?:[^\s/'\"`:;,()]+/)+[^\s/'\"`:;,()]*")
"""A path of this machine; an address of the web and a path of an API are none."""


class Problem(Exception):
    """An error that refuses a request.

    Args:
        status: of HTTP.
        code: in one word, for programs and for the log: "invalid_api_key".
        message: for people. It repeats nothing of the request.
        retry_after: seconds after which it is worth trying again.
        param: the field of the request that is wrong.
    """

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: float | None = None, param: str | None = None
    ) -> None:
        self.status, self.code, self.message, self.retry_after, self.param = status, code, message, retry_after, param
        super().__init__(message)


def over_rate(rate: int, wait: float, *, user: bool = False) -> Problem:
    """Return the error for a key or an end user over its requests per minute."""
    whose, code = ("of one user", "user_rate_limit_exceeded") if user else ("with this key", "rate_limit_exceeded")
    return Problem(429, code, f"over {rate:,} requests per minute {whose}", retry_after=wait)


def over_most(limit: int, *, user: bool = False) -> Problem:
    """Return the error for a key or an end user with too many requests at once."""
    whose, code = ("user", "user_concurrency_limit_exceeded") if user else ("key", "concurrency_limit_exceeded")
    return Problem(429, code, f"{limit} requests of this {whose} are being answered; wait for one to end", retry_after=1)


def unread_reason(error: BaseException) -> str:
    """Why a request could not be read, in one word; "" if it must not be answered unread: the fault is the client's or the
    provider's, or what it says was forgotten, or it works when it is asked again."""
    match error:
        case StoreStale():
            return ""  # it works when it is asked again, and perhaps something was forgotten
        case StoreError():
            return next(reason for kind, (reason, _) in STORE.items() if isinstance(error, kind))
        case WireError():
            return "unknown-shape"
        case EmptyPrompt() | Forgotten() | ModelError() | SpecError() | Problem():
            return ""
        case KernelError():
            return "kernel"
        case Exception():
            return "internal"
    return ""


def client_message(error: KilburnError) -> str:
    """Return the message of an error for a client."""
    if isinstance(error, StoreError):
        return next(words for kind, (_, words) in STORE.items() if isinstance(error, kind))
    return _FILE.sub("…", f"{error.what}: {error.advice}" if error.advice else error.what)


def to_problem(error: KilburnError) -> Problem:
    """Return the error for a refused change or look by hand."""
    match error:
        case StoreStale():
            status, code = 409, "store_changed"
        case StoreError():
            status, code = 503, next(reason for kind, (reason, _) in STORE.items() if isinstance(error, kind)).replace("-", "_")
        case UnknownAddress():
            status, code = 404, "unknown_address"
        case Forgotten():
            status, code = 410, "forgotten"
        case InvalidBudget() | SpecError():
            status, code = 400, "invalid_request"
        case LawBroken():
            status, code = 409, "law_broken"
        case _:
            status, code = 409, "not_possible"
    return Problem(status, code, client_message(error))


def has_openai_api(url: str) -> bool:
    """Return whether a base URL is one of OpenAI's API: its path has a version, such as /v1, /api/v1 or /v1beta/openai. Others,
    and those with a part `anthropic`, are base URLs of Anthropic's."""
    _, slash, path = url.partition("://")[2].partition("/")
    return bool(VERSIONED.search(slash + path)) and "/anthropic" not in slash + path


def is_anthropic(path: str) -> bool:
    """Return whether a route is of Anthropic's API; errors of all others have OpenAI's form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(problem: Problem, path: str, request: str) -> bytes:
    """Return the error's body as JSON.

    Args:
        request: the request's id, which Anthropic's form has.
    """
    if is_anthropic(path):
        return msgspec.json.encode(anthropic_error(problem.status, problem.message, request))
    return msgspec.json.encode(openai_error(problem.status, problem.message, problem.code, problem.param))


def anthropic_error(status: int, message: str, request: str) -> dict[str, Any]:
    """Return an error in the form of Anthropic's API."""
    kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{request}"}


def openai_error(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return an error in the form of OpenAI's APIs."""
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
