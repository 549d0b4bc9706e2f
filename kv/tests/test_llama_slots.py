"""Slots of a real llama.cpp server: what was saved comes back, and what is anything else never reaches llama.cpp."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kilburn.errors import InvalidRange, KVError, Overlong, Refused, SpillFailed
from kilburn.model import Request, complete
from kilburn.models.llama_server import LlamaServer, load
from kilburn.models.local import Local
from kilburn.models.weights import pull
from kilburn_kv.llama.slots import Slots

pytestmark = pytest.mark.model

TEXT = (
    "The keeper of the north lighthouse wrote a line into the book every evening. The lamp was lit at six and the sea was"
    " calm. The password of the signal room is marigold, and nobody but the keeper may know it."
)


@pytest.fixture(scope="module")
def server() -> LlamaServer:
    return load(pull("smollm2"), 512, 1)


@pytest.fixture
def slots(server: LlamaServer, tmp_path: Path) -> Slots:
    return Slots(server, "digest", tmp_path / "slots")


def likeliest(server: LlamaServer, tokens: list[int]) -> tuple[object, int]:
    """The five likeliest next tokens with their log-probabilities, and how many tokens ran for that."""
    body = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": 5, "id_slot": 0}
    answer = server.ask("POST", "/completion", body)
    return answer["completion_probabilities"], answer["timings"]["prompt_n"]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 100,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def other(slots: Slots, server: LlamaServer) -> None:
    """Another prompt takes the slot, and the server forgets the old one."""
    server.ask("POST", "/slots/0?action=erase")
    slots.prefill([1, 2, 3])


def test_a_saved_slot_is_not_read_again(slots: Slots, server: LlamaServer, tmp_path: Path) -> None:
    tokens = slots.tokenize(TEXT)
    server.ask("POST", "/slots/0?action=erase")
    read = slots.prefill(tokens)
    assert (read.computed, read.cached) == (len(tokens), 0)
    saved = slots.save(tokens)
    assert (saved.tokens, saved.name) == (len(tokens), slots.states.name(tokens))
    assert saved.bytes < len(tokens) * 23_500
    expected, ran = likeliest(server, tokens)
    assert ran == 1
    other(slots, server)
    again = Slots(server, "digest", tmp_path / "slots")
    assert again.restore(saved.name) == len(tokens)
    assert likeliest(server, tokens) == (expected, 1)


def test_a_chat_through_the_same_server_goes_on_from_it(slots: Slots, server: LlamaServer) -> None:
    with Local(pull("smollm2"), context=512, threads=1) as local:
        talk = Request(messages=({"role": "user", "content": TEXT},), max_tokens=1, temperature=0.0)
        text = server.ask("POST", "/apply-template", {"messages": list(talk.messages)})["prompt"]
        tokens = slots.tokenize(text)
        saved = slots.save(tokens)
        other(slots, server)
        assert slots.restore(saved.name) == len(tokens)
        usage = complete(local, talk).usage
        assert usage is not None
        assert usage.prompt == len(tokens)
        assert usage.cached == len(tokens) - 1


@pytest.mark.parametrize(
    ("end", "harm"),
    [
        (".kv", lambda data: data[: len(data) // 2]),
        (".kv", lambda data: b""),
        (".kv", lambda data: data[:-999] + bytes([data[-999] ^ 1]) + data[-998:]),
        (".json", lambda data: data[: len(data) // 2]),
        (".json", lambda data: data.replace(b'"xllamacpp ', b'"xllamacpp 1')),
    ],
)
def test_a_file_that_is_not_what_was_saved_is_a_miss(
    slots: Slots, tmp_path: Path, end: str, harm: Callable[[bytes], bytes]
) -> None:
    """llama.cpp itself ends the session at the first two of these, and takes the third."""
    tokens = slots.tokenize("The lamp was lit at six.")
    saved = slots.save(tokens)
    file = tmp_path / "slots" / (saved.name + end)
    file.write_bytes(harm(file.read_bytes()))
    assert slots.restore(saved.name) is None
    assert slots.restore(slots.save(tokens).name) == len(tokens)


def test_another_models_or_tenants_slot_is_a_miss(slots: Slots, server: LlamaServer, tmp_path: Path) -> None:
    tokens = slots.tokenize("The lamp was lit at six.")
    saved = slots.save(tokens)
    for stranger in (Slots(server, "other", tmp_path / "slots"), Slots(server, "digest", tmp_path / "slots", tenant="theirs")):
        assert stranger.restore(saved.name) is None
        assert stranger.restore(stranger.states.name(tokens)) is None
        assert stranger.save(tokens).name != saved.name
    assert slots.restore(saved.name) == len(tokens)
    assert slots.restore("") is None


def test_a_smaller_window_takes_no_larger_slot(slots: Slots, server: LlamaServer, tmp_path: Path) -> None:
    tokens = slots.tokenize(TEXT * 7)
    assert len(tokens) > 256
    saved = slots.save(tokens)
    small = load(pull("smollm2"), 256, 1)
    assert Slots(small, "digest", tmp_path / "slots").restore(saved.name) is None
    less = slots.save(tokens[:200])
    assert Slots(small, "digest", tmp_path / "slots").restore(less.name) == 200


def test_a_full_disk_leaves_the_slot_usable(slots: Slots, server: LlamaServer, tmp_path: Path) -> None:
    tokens = slots.tokenize(TEXT)
    slots.prefill(tokens)
    expected, _ = likeliest(server, tokens)
    with full_disk(), pytest.raises(SpillFailed):
        slots.save(tokens)
    assert list((tmp_path / "slots").iterdir()) == []
    assert list(server.slots.iterdir()) == []
    assert likeliest(server, tokens) == (expected, 1)
    assert slots.restore(slots.save(tokens).name) == len(tokens)


class Busy:
    """A server that somebody else uses just before a slot is saved."""

    def __init__(self, server: LlamaServer, tokens: list[int]) -> None:
        self._server, self._tokens, self.context = server, tokens, server.context

    @property
    def slots(self) -> Path:
        return self._server.slots

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        if path.endswith("save"):
            self._server.ask("POST", "/completion", {"prompt": self._tokens, "n_predict": 0, "id_slot": 0})
        return self._server.ask(method, path, body, timeout)


def test_a_slot_that_another_request_took_is_not_saved_as_ours(slots: Slots, server: LlamaServer, tmp_path: Path) -> None:
    tokens = slots.tokenize("The lamp was lit at six.")
    # As many tokens, and others.
    theirs = tokens[:-2] + tokens[:2]
    busy = Slots(Busy(server, theirs), "digest", tmp_path / "slots")
    with pytest.raises(KVError, match="another request"):
        busy.save(tokens)
    assert list((tmp_path / "slots").iterdir()) == []


def test_tokens_that_cannot_be_are_refused(slots: Slots) -> None:
    with pytest.raises(InvalidRange):
        slots.prefill([])
    with pytest.raises(Overlong):
        slots.save([5] * 600)
    with pytest.raises(Refused):
        slots.prefill([5, 49_152])
    assert slots.prefill([5, 6, 7]).computed >= 1
