"""Errors as clients expect them: the provider's own form, by route."""

from __future__ import annotations

import msgspec

__all__ = ["OF_A_USER", "Problem", "body_of", "is_anthropic"]

OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
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

OF_A_USER = ("user_rate_limit_exceeded", "user_concurrency_limit_exceeded")
"""Codes of refusals of one end user, for which the others below the same key do not pay."""


class Problem(Exception):
    """A request that is not answered.

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


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API; errors of all others have OpenAI's form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def body_of(problem: Problem, path: str, request: str) -> bytes:
    """The error's body, in JSON.

    Args:
        request: the request's id, which Anthropic's form has.
    """
    if is_anthropic(path):
        kind = ANTHROPIC.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
        inner = {"type": kind, "message": problem.message}
        return msgspec.json.encode({"type": "error", "error": inner, "request_id": f"req_{request}"})
    kind = OPENAI.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    said = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
    return msgspec.json.encode({"error": said})
