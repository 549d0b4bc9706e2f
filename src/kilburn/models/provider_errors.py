"""What a provider's error means: its status, code and words, turned into one of Kilburn's errors.

One table serves every HTTP provider, because they borrow each other's formats.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from kilburn.errors import ModelError, Overlong, RateLimited, Refused, ToolsRefused, Unavailable
from kilburn.models.retry import seconds_to_wait

MESSAGE_LETTERS = 400
"""Characters of a provider's message that an error quotes at most."""

_OVERLONG_CODES = {"context_length_exceeded", "exceed_context_size_error", "request_too_large", "string_above_max_length"}
_OVERLONG_WORDS = re.compile(
    r"maximum context length|maximum model length|max_model_len|context (size|length|window|limit)"
    r"|exceeds? (the )?(available )?(model'?s? )?context|(prompt|input) is too long"
    r"|too many (input |prompt )?tokens|longer than the (maximum )?model",
    re.IGNORECASE,
)
_TOOLS = r"\b(?:tools|tool[ _](?:use|calls?|calling|choice|param)|functions|function[ _]call(?:s|ing)?)\b(?![.\[]\d|\[|-)"
_UNKNOWN = (
    r"(?:(?:not|n't|un)[ -]?(?:support|enable|allow|permit)\w*|requires? --|un(?:recogni[sz]ed|known|expected)|extra inputs)"
)
_NO_TOOLS = re.compile(rf"{_TOOLS}[^.;]{{0,30}}{_UNKNOWN}|{_UNKNOWN}[^.;]{{0,30}}{_TOOLS}|no endpoints .*support tool use", re.I)
"""A server that takes no tools, or was started without them, says so in these words. What stands within one of the tools
(`tools[0].name`) is another matter."""
_CANNOT = re.compile(r"\b(is|are) not supported", re.IGNORECASE)
_BUSY = {"overloaded_error", "api_error", "timeout_error", "server_error", "internal_error", "unavailable_error"}
_QUOTA = {"insufficient_quota", "billing_not_active", "billing_error"}
_REFUSALS = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "invalid_api_key",
    "model_not_found",
    "content_filter",
    "content_policy_violation",
}
_ADVICE = {
    400: "the provider calls the request malformed; see its words",
    401: "check the API key",
    402: "check the account's balance",
    403: "this key may not use this model",
    404: "check the model's name and the base URL",
}
_PASSING = {408, 409, 423, 425}
"""Client errors after which a later try may succeed."""


def provider_error(
    name: str, status: int | None, body: object, words: str, headers: Mapping[str, str] | None = None
) -> ModelError:
    """Return the error to raise for a provider's response.

    Args:
        name: the model's name, for the message.
        status: the HTTP status, or None for an error inside a stream.
        body: the decoded response, with or without its `error` envelope.
        words: the response as text.
        headers: of the response, for `retry-after`.
    """
    error = _typed_error(name, status, body, words, headers or {})
    error.status = status
    return error


def _typed_error(name: str, status: int | None, body: object, words: str, headers: Mapping[str, str]) -> ModelError:
    error = _envelope(body)
    code, kind = str(error.get("code") or ""), str(error.get("type") or "")
    if status is None and code.isdigit():
        status = int(code)
    message = str(error.get("message") or words).strip()[:MESSAGE_LETTERS] or "no explanation"
    text = f"{name}: {message}" + (f" [{status}]" if status else "")
    names = {code, kind}
    if names & _OVERLONG_CODES or status == 413 or (status not in (401, 403, 429) and _OVERLONG_WORDS.search(message)):
        return Overlong(text, advice="send less, ask for a shorter reply, or open a smaller window")
    if status not in (401, 402, 403, 429) and _NO_TOOLS.search(message):
        return ToolsRefused(text, advice="ask without tools, or use a model and a server that take them")
    if names & _QUOTA:
        return Refused(text, advice="check the account's balance")
    if status == 429 or names & {"rate_limit_error", "rate_limit_exceeded"}:
        wait = seconds_to_wait(headers.get("retry-after"), headers.get("retry-after-ms"), time.time())
        return RateLimited(text, advice="wait, or ask less often", retry_after=wait)
    if status is None:
        return Refused(text, advice=_ADVICE[400]) if names & _REFUSALS and not names & _BUSY else Unavailable(text)
    if (status >= 500 and not _CANNOT.search(message)) or status in _PASSING:
        return Unavailable(text, advice="try again later")
    return Refused(text, advice=_ADVICE.get(status, "the provider will not answer this request"))


def _envelope(body: object) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        return {}
    inner = body.get("error")
    if isinstance(inner, Mapping):
        return inner
    if isinstance(inner, str):
        return {**body, "message": inner}
    return body
