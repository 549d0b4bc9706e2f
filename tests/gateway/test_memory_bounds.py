"""What a gateway keeps in memory has bounds in bytes, and whatever was dropped for them is found again."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kilburn
from effort import FULL, rounds
from gateway.test_crash import Served
from kilburn import remembered
from kilburn.backends.passages import _compounds
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.faults import MODELS, Offer
from kilburn.gateway.history import LEADS, Histories
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.replies import ReplyPlace, ReplyPlaces
from kilburn.gateway.responses import ResponsesForm
from kilburn.gateway.sayings import MAX_DIGESTS, WIDTH, Sayings, message_key
from kilburn.policies.importance import significant_words
from kilburn.remembered import Recent
from kilburn.selection.passages import _split_word, comparable_lines, split_lines, split_passages
from kilburn.selection.selection import page_candidates
from kilburn.testing.upstream import Upstream, serving
from kilburn.wire.form import parse

FORM = ChatForm()
HELD = 400_000
"""Bytes of sessions that may stay in memory here: some ten short ones."""


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]

        def taken() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield taken
    finally:
        tracemalloc.stop()


@contextmanager
def histories_in(folder: Path, held: int = HELD) -> Iterator[Histories]:
    with kilburn.open(str(folder / "g.db"), window=3000, policy="cost", tokenizer="chars/4", embedder=None) as store:
        yield Histories(store, RequestBounds(held=held))


def answer(histories: Histories, talk: list[dict[str, Any]], question: str, reply: str) -> str:
    """One more exchange of a talk; the name of its session."""
    talk.append({"role": "user", "content": question})
    asked = FORM.open(json.dumps({"model": "m", "messages": talk}).encode())
    conversation = histories.take(FORM, asked, None, "")
    conversation.session.render(FORM.rendered)
    talk.append({"role": "assistant", "content": reply})
    histories.said(conversation, parse(talk[-1]))
    histories.give(conversation)
    return conversation.name


def forget() -> None:
    """Drop what functions remember: that has bounds of its own."""
    remembered.texts.clear()
    _split_word.cache_clear()
    _compounds.cache_clear()


def words(chance: random.Random, count: int) -> str:
    return " ".join(f"{chance.choice('aeiou')}{chance.randrange(10**6):x}" for _ in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [2, 30], ids=["many sessions", "long sessions"])
def test_sessions_in_memory_take_what_they_may_after_n_and_two_n_and_four_n_answers(tmp_path: Path, exchanges: int) -> None:
    chance, number, taken = random.Random(1), 0, list[int]()

    def some(histories: Histories, answers: int) -> None:
        nonlocal number
        for _ in range(answers // exchanges):
            number += 1
            talk: list[dict[str, Any]] = []
            for at in range(exchanges):
                answer(histories, talk, f"{number}.{at} {words(chance, 40)}", f"re {number}.{at} {words(chance, 40)}")

    with histories_in(tmp_path) as histories:
        # What is loaded once.
        some(histories, 90)
        forget()
        with traced() as now:
            for answers in (90, 90, 180):
                some(histories, answers)
                forget()
                # One is kept in any case, and it is looked after as the next one comes.
                assert histories.size <= HELD + 250_000
                assert histories.held < 60
                taken.append(now())
    # Of each session the store's row stays. Without a bound a session of four messages takes 9 KB.
    sessions = 180 // exchanges
    assert taken[2] - taken[1] <= 1500 * sessions + 150_000, taken


def test_what_a_session_takes_is_known(tmp_path: Path) -> None:
    chance = random.Random(2)
    with histories_in(tmp_path, held=1 << 30) as histories:
        for number in range(3):
            answer(histories, [], f"{number} {words(chance, 20)}", "re")
        before = histories.size
        with traced() as now:
            talk: list[dict[str, Any]] = []
            for at in range(30):
                # Half of it in letters of three bytes in UTF-8, which take two in memory.
                answer(histories, talk, f"{at} {words(chance, 60)}", f"re {at} {'文字' * 200}")
            forget()
            assert 0.5 < (histories.size - before) / now() < 1.6


@pytest.mark.parametrize("seed", range(rounds(1, 3)))
def test_what_left_memory_is_found_again(tmp_path: Path, seed: int) -> None:
    """The same talks with room for everything, and with room for nothing."""
    names = []
    for held in (1 << 30, 1):
        folder, chance = tmp_path / str(held), random.Random(seed)
        folder.mkdir()
        with histories_in(folder, held) as histories:
            talks: list[list[dict[str, Any]]] = [[]]
            said = []
            for at in range(60):
                talk = chance.choice(talks)
                if chance.random() < 0.2:
                    # A client goes back, and on in another way.
                    talk = [*talk[: 2 * chance.randrange(1 + len(talk) // 2)]]
                    talks.append(talk)
                said.append(answer(histories, talk, f"{at} {words(chance, 20)}", f"re {words(chance, 20)}"))
            names.append(said)
            assert held > 1 or histories.held <= 2
    assert names[0] == names[1]


def test_a_table_of_what_messages_say_never_grows_and_never_lies() -> None:
    chance, sayings, kept = random.Random(3), Sayings(1024), dict[bytes, bytes]()
    size, found = sayings.size, 0
    with traced() as now:
        for number in range(8000):
            key = message_key(b"chat", b"%d" % number)
            said = b"".join(
                bytes((chance.randrange(2),)) + chance.randbytes(WIDTH - 1) for _ in range(chance.choice((0, 1, 1, 1, 3)))
            )
            sayings.keep(key, said)
            # Rows of one message may have the same place.
            assert sayings.get(key) in ((None, said) if len(said) > 2 * WIDTH else (said,))
            kept[key] = said
            if number in (1000, 2000, 4000, 7999):
                assert all(sayings.get(each) in (None, said) for each, said in kept.items())
                found = sum(sayings.get(each) is not None for each in kept)
                assert sayings.size == size
        kept.clear()
        assert now() < 10_000
    assert 400 < found <= 1024
    assert sayings.get(message_key(b"messages", b"7999")) is None, "another form"


def test_one_message_that_says_very_much_leaves_the_others_there() -> None:
    sayings, one, much = Sayings(), message_key(b"chat", b"one"), message_key(b"messages", b"much")
    sayings.keep(one, b"\1" + bytes(16))
    sayings.keep(much, bytes(WIDTH) * 100_000)
    assert sayings.get(much) is None
    assert sayings.get(one) == b"\1" + bytes(16)
    sayings.keep(much, bytes(WIDTH) * MAX_DIGESTS)
    assert sayings.get(much) == bytes(WIDTH) * MAX_DIGESTS


def test_messages_are_recognised_whether_or_not_they_are_in_the_table(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    raws = [
        json.dumps(each).encode()
        for each in (
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "I look", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "assistant", "content": "so"},
            {"role": "assistant", "content": "it is"},
            {"role": "user", "content": ""},
        )
    ]
    with kilburn.open(str(tmp_path / "g.db"), embedder=None) as store:
        large, small = Histories(store), Histories(store, sayings=Sayings(2))
        first = large.digests(FORM, raws)
        assert len(first[0]) == 5
        assert [large.digests(FORM, raws), small.digests(FORM, raws), small.digests(FORM, raws)] == [first] * 3


def test_the_places_of_replies_are_bounded_and_small() -> None:
    places = ReplyPlaces(2000)
    keys = [hashlib.blake2b(b"%d" % number, digest_size=12).hexdigest() for number in range(8000)]
    with traced() as now:
        for number, key in enumerate(keys):
            place = ReplyPlace(f"chat-{number % 9:016x}", number % 9, number, ("call",) if number % 7 == 0 else ())
            places.keep(key, place)
            assert places.get(key) == place
            assert len(places) <= 2000
        assert now() < 2000 * 280
    assert places.get(keys[0]) is None
    assert places.get(keys[-900]) is not None


def test_a_reply_whose_place_was_dropped_is_found_in_the_store(tmp_path: Path) -> None:
    form = ResponsesForm()
    with histories_in(tmp_path) as histories:
        histories._replies = ReplyPlaces(4)
        for number in range(9):
            asked = form.open(json.dumps({"model": "m", "input": f"{number} asks"}).encode())
            conversation = histories.take(form, asked, None, "")
            histories.said(conversation, parse({"role": "assistant", "content": "so"}))
            histories.replied(conversation, f"resp_{number}")
            histories.give(conversation)
        for number in (0, 8, 3, 1, 0):
            body = json.dumps({"model": "m", "previous_response_id": f"resp_{number}", "input": "on"}).encode()
            assert histories.has(form, body, {}, "")
        assert not histories.has(form, b'{"model": "m", "previous_response_id": "resp_x", "input": "on"}', {}, "")
        assert len(histories._replies) <= 4


def test_values_that_were_used_last_stay_up_to_so_many_bytes() -> None:
    recent: Recent[int, str] = Recent(1000)
    for number in range(500):
        recent.keep(number, str(number), 10)
        assert recent.get(0) == "0", "it is used all the time"
        assert recent.taken <= 1000
        assert recent.taken == 10 * len(recent)
    assert recent.get(499) == "499"
    assert recent.get(300) is None
    recent.keep(1000, "too large", 600)
    assert recent.get(1000) is None
    recent.keep(499, "another", 20)
    assert recent.get(499) == "another"
    assert recent.taken <= 1000


TEXTS: dict[str, Callable[[random.Random], str]] = {
    "prose": lambda chance: words(chance, 1500),
    "short lines": lambda chance: "\n".join(f"ab{chance.randrange(10**6)}" for _ in range(400)),
    "log": lambda chance: "\n".join(
        f"12:00:{at % 60:02} ERROR worker[{at}] at 0x{chance.getrandbits(32):x}" for at in range(200)
    ),
    "another script": lambda chance: "\n".join(
        "".join(chr(0x4E00 + chance.randrange(9000)) for _ in range(60)) for _ in range(60)
    ),
}


@pytest.mark.parametrize("kind", TEXTS if FULL else ["log", "another script"])
def test_what_is_worked_out_of_texts_stays_within_its_bytes(kind: str) -> None:
    chance, texts, count = random.Random(4), remembered.texts, 0
    before, texts.most = texts.most, 2 << 20
    try:
        page_candidates(TEXTS[kind](chance), 1, 1, "assistant", 600)
        forget()
        with traced() as now:
            while count < 8 or not texts._left:
                count += 1
                text = TEXTS[kind](chance)
                page_candidates(text, count, count, "assistant", 600)
                split_passages(text, 300)
                split_lines(text, True, 20_000)
                comparable_lines(text)
                significant_words(text)
                assert texts.taken <= texts.most
            # Parts of words are remembered by number: they are short.
            _split_word.cache_clear()
            assert now() < 1.4 * texts.taken
    finally:
        texts.most = before
        forget()


def test_what_is_known_of_models_and_of_system_prompts_has_bounds(tmp_path: Path) -> None:
    offer = Offer("auto")
    for number in range(2 * MODELS):
        offer.refused(f"m{number}", (), certain=True)
        offer.refused(f"n{number}", (), certain=False)
    assert len(offer._refusing) <= MODELS
    assert len(offer._suspected) <= MODELS
    assert not offer.to(f"m{2 * MODELS - 1}", ())
    with histories_in(tmp_path) as histories:
        for lead in range(3):
            talk = [{"role": "system", "content": f"{lead} {number}"} for number in range(LEADS - 300)]
            answer(histories, talk, f"asks {lead}", "so")
            assert len(histories._leads) == min(LEADS, (lead + 1) * (LEADS - 300))


@pytest.mark.slow
def test_a_gateway_takes_no_more_memory_after_many_answers(tmp_path: Path) -> None:
    """Many users, sessions that overflow, streamed or not, as a process of its own."""
    chance, answers, taken = random.Random(5), itertools.count(1), list[int]()
    first, last = 6_000, rounds(9_000, 20_000)

    def talk(gateway: Served, user: int) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(chance.choice((1, 2, 5, 10))):
            messages.append({"role": "user", "content": f"{user}.{turn} {words(chance, 80)}"})
            text, _ = gateway.ask(messages, stream=turn % 2 == 0, authorization=f"Bearer user-{user}")
            messages.append({"role": "assistant", "content": text})
            if next(answers) in (first, last):
                status = Path(f"/proc/{gateway.process.pid}/status").read_text()
                taken.append(int(re.findall(r"RssAnon:\s+(\d+)", status)[0]))

    with serving(Upstream(otherwise=lambda sent: words(chance, 60), measured=False, piece=200)) as upstream:
        gateway = Served(tmp_path / "gateway.db", upstream)
        try:
            for user in itertools.count():
                if len(taken) == 2:
                    break
                talk(gateway, user)
        finally:
            gateway.stop()
    # The store's cache and the index of sessions fill: some hundred bytes an answer. A leak was 25 KB an answer.
    assert taken[1] - taken[0] < 2 * (last - first), taken
