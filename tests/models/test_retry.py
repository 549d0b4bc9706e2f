"""Failed calls are made again, never too early, never for ever, and never after a piece was handed on."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import ModelError, Overlong, RateLimited, Refused, Unavailable
from kilburn.models.provider_errors import provider_error
from kilburn.models.retry import Retry, seconds_to_wait


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def read(self) -> float:
        return self.now


def policy(clock: Clock, **more: float) -> Retry:
    return Retry(**{"sleep": clock.sleep, "clock": clock.read, "dice": lambda: 0.5, **more})  # type: ignore[arg-type]


class Calls:
    """Fails with each error in turn, then gives two pieces."""

    def __init__(self, *errors: ModelError, after: int = 0) -> None:
        self.errors = list(errors)
        self.after = after
        self.left: list[float | None] = []

    def __call__(self, left: float | None) -> Generator[str, None, None]:
        self.left.append(left)
        yield from ["early"] * self.after
        if self.errors:
            raise self.errors.pop(0)
        yield from ("a", "b")


def test_pauses_double_and_the_reply_comes() -> None:
    clock, calls = Clock(), Calls(Unavailable("1"), Unavailable("2"), Unavailable("3"))
    assert list(policy(clock).stream(calls, None)) == ["a", "b"]
    assert clock.slept == [0.25, 0.5, 1.0]
    assert calls.left == [None] * 4


def test_attempts_are_counted() -> None:
    clock, calls = Clock(), Calls(*(Unavailable(str(number)) for number in range(9)))
    with pytest.raises(Unavailable, match="model: 2"):
        list(policy(clock, attempts=3).stream(calls, None))
    assert len(calls.left) == 3


def test_providers_word_is_kept_within_the_cap() -> None:
    clock = Clock()
    assert list(policy(clock).stream(Calls(RateLimited("wait", retry_after=7.0)), None)) == ["a", "b"]
    assert clock.slept == [7.0]
    patient = Calls(RateLimited("wait", retry_after=31.0))
    with pytest.raises(RateLimited) as caught:
        list(policy(clock).stream(patient, None))
    assert caught.value.retry_after == 31.0
    assert len(patient.left) == 1


@pytest.mark.parametrize("error", [Refused("no"), Overlong("too much")])
def test_what_would_fail_again_is_not_tried_again(error: ModelError) -> None:
    clock, calls = Clock(), Calls(error)
    with pytest.raises(type(error)):
        list(policy(clock).stream(calls, None))
    assert len(calls.left) == 1
    assert clock.slept == []


def test_nothing_is_said_twice() -> None:
    calls = Calls(Unavailable("lost"), after=1)
    got: list[str] = []
    with pytest.raises(Unavailable):
        got.extend(policy(Clock()).stream(calls, None))
    assert got == ["early"]
    assert len(calls.left) == 1


def test_time_bounds_tries_and_pauses_together() -> None:
    clock, calls = Clock(), Calls(*(Unavailable(str(number)) for number in range(99)))
    with pytest.raises(Unavailable):
        list(policy(clock, attempts=99).stream(calls, 3.0))
    assert sum(clock.slept) < 3.0
    assert calls.left[0] == 3.0
    assert calls.left == sorted(calls.left, reverse=True)  # type: ignore[type-var]


@given(failed=st.integers(1, 60), dice=st.floats(0, 1, exclude_max=True))
def test_a_pause_is_never_longer_than_the_cap(failed: int, dice: float) -> None:
    pause = Retry(attempts=100, dice=lambda: dice).pause(failed, Unavailable("x"))
    assert pause is not None
    assert 0 <= pause <= 30


@pytest.mark.parametrize(
    ("asked", "milliseconds", "wait"),
    [
        ("2", None, 2.0),
        ("0.5", None, 0.5),
        ("9", "250", 0.25),
        (None, None, None),
        ("soon", None, None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", None, 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", None, 0.0),
    ],
)
def test_retry_after_is_read(asked: str | None, milliseconds: str | None, wait: float | None) -> None:
    assert seconds_to_wait(asked, milliseconds, 60.0) == wait


SAID = [
    # OpenAI, vLLM, llama.cpp, Anthropic, Ollama, a proxy that only gives words
    (400, {"code": "context_length_exceeded", "message": "Too much."}, Overlong),
    (400, {"error": {"message": "maximum context length is 4096 tokens, you requested 9000", "code": 400}}, Overlong),
    (400, {"error": {"type": "exceed_context_size_error", "message": "request (9 tokens) exceeds", "code": 400}}, Overlong),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8"}}, Overlong),
    (413, {"type": "error", "error": {"type": "request_too_large", "message": "Request exceeds the maximum size"}}, Overlong),
    (500, {"error": "the input length exceeds the context length"}, Overlong),
    (None, {"code": 400, "type": "exceed_context_size_error", "message": "Context size has been exceeded."}, Overlong),
    (400, {"error": {"message": "temperature must be at most 2"}}, Refused),
    (401, {"error": {"message": "Incorrect API key", "code": "invalid_api_key"}}, Refused),
    (403, None, Refused),
    (404, {"error": {"message": "no such model"}}, Refused),
    (429, {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota"}}, Refused),
    (500, {"error": {"code": 500, "message": "image input is not supported"}}, Refused),
    (429, {"error": {"message": "Rate limit reached"}}, RateLimited),
    (429, {"error": {"message": "This request would exceed your token limit: context window per minute"}}, RateLimited),
    (None, {"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}, RateLimited),
    (None, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, Unavailable),
    (None, {"type": "error", "error": {"type": "invalid_request_error", "message": "bad"}}, Refused),
    (408, None, Unavailable),
    (503, "<html>busy</html>", Unavailable),
    (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, Unavailable),
]


@pytest.mark.parametrize(("status", "body", "kind"), SAID)
def test_errors_of_providers_get_their_type(status: int | None, body: object, kind: type[ModelError]) -> None:
    error = provider_error("model-1", status, body, "words", {"retry-after": "3"})
    assert type(error) is kind
    assert "model-1" in str(error)
    if isinstance(error, RateLimited):
        assert error.retry_after == 3.0


def test_an_error_quotes_no_more_than_a_page() -> None:
    assert len(str(provider_error("m", 500, None, "x" * 100_000))) < 700
