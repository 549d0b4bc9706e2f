"""Which session a history continues: clients that resend, edit, cut, branch and compact, and gateways that start again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kilburn
from effort import rounds
from gateway.test_lost_writes import lost
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import repair_store
from kilburn.errors import OrphanResult, StoreBusy, StoreStale, StoreUnavailable
from kilburn.event import Act
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.conversations import Conversation
from kilburn.gateway.history import Histories
from kilburn.gateway.messages import MessagesForm
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing.laws import check_laws
from kilburn.wire.digests import HIDDEN, canonical
from kilburn.wire.form import parse
from kilburn.wire.histories import chain_seed, chained

CHAT, MESSAGES = ChatForm(), MessagesForm()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def take(histories: Histories, messages: list[Any], *, form: Any = CHAT, name: str | None = None, of: str = "") -> Conversation:
    body = msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": messages})
    return histories.take(form, form.open(body), name, of)


def turn(histories: Histories, messages: list[Any], reply: str, **more: Any) -> str:
    """One request with its reply; returns the session's name."""
    conversation = take(histories, messages, **more)
    histories.said(conversation, parse(assistant(reply)))
    histories.give(conversation)
    return conversation.name


def hidden_turn(histories: Histories, messages: list[Any], reply: str) -> str:
    """One request in which the model recalled something before it answered."""
    conversation = take(histories, messages)
    call = Part(kind=Kind.CALL, text='{"address":"p1"}', call=f"{HIDDEN}{len(messages)}", name="recall")
    result = Part(kind=Kind.RESULT, text="recalled", call=call.call)
    said = [Message(role=Role.ASSISTANT, parts=(call,)), Message(role=Role.TOOL, parts=(result,), sources=(1,))]
    histories.said(conversation, said, more=True)
    histories.said(conversation, parse(assistant(reply)))
    histories.give(conversation)
    return conversation.name


def visible(store: kilburn.Store, name: str) -> list[str]:
    """The texts of a session that the client knows."""
    return [
        part.text
        for message in store.session(name).contents.originals()
        for part in message.parts
        if not (part.call or "").startswith(HIDDEN)
    ]


class Client(RuleBasedStateMachine):
    """A client with several conversations, beside a plain model: a list of texts for each session."""

    @initialize()
    def start(self) -> None:
        self.folder = TemporaryDirectory()
        self.path = str(Path(self.folder.name) / "a.db")
        self.number = 0
        self.held: dict[str, list[str]] = {}
        self.talks: list[list[dict[str, Any]]] = [[]]
        self.open()

    def open(self) -> None:
        self.store = kilburn.open(self.path, window=100_000, policy="fifo", tokenizer="chars/4", embedder=None)
        self.histories = Histories(self.store)

    def say(self, talk: list[dict[str, Any]], *, hidden: bool) -> None:
        self.number += 1
        # A few first messages are the same, as with a template.
        talk.append(user(f"say {self.number % 2 if not talk else self.number}"))
        reply = f"reply {self.number}"
        name = (hidden_turn if hidden else turn)(self.histories, talk, reply)
        talk.append(assistant(reply))
        said = [message["content"] for message in talk]
        before = self.held.get(name)
        assert before is None or said[: len(before)] == before, "a session was overwritten"
        self.held[name] = said

    @rule(at=st.integers(0, 9), hidden=st.booleans())
    def go_on(self, at: int, hidden: bool) -> None:
        talk = self.talks[at % len(self.talks)]
        count = len(self.held)
        known = [message["content"] for message in talk] in self.held.values()
        self.say(talk, hidden=hidden)
        if known:
            assert len(self.held) == count, "what was only continued got a new session"

    @rule()
    def begin(self) -> None:
        self.talks.append([])
        self.say(self.talks[-1], hidden=False)

    @rule(at=st.integers(0, 9), where=st.integers(0, 20), hidden=st.booleans())
    def branch(self, at: int, where: int, hidden: bool) -> None:
        talk = self.talks[at % len(self.talks)]
        cut = where % (len(talk) + 1) // 2 * 2
        self.talks.append([dict(message) for message in talk[:cut]])
        self.say(self.talks[-1], hidden=hidden)

    @rule(at=st.integers(0, 9), where=st.integers(0, 20))
    def edit(self, at: int, where: int) -> None:
        talk = [dict(message) for message in self.talks[at % len(self.talks)]]
        if talk:
            talk[where % len(talk)]["content"] += " (edited)"
            self.talks.append(talk)
            self.say(talk, hidden=False)

    @rule(at=st.integers(0, 9))
    def fail_and_ask_again(self, at: int) -> None:
        """The upstream fails after the message was taken in; the client sends it again."""
        talk = self.talks[at % len(self.talks)]
        self.number += 1
        conversation = take(self.histories, [*talk, user(f"again {self.number}")])
        self.histories.give(conversation)
        talk.append(user(f"again {self.number}"))
        name = turn(self.histories, talk, f"reply {self.number}")
        assert name == conversation.name
        talk.append(assistant(f"reply {self.number}"))
        self.held[name] = [message["content"] for message in talk]

    @rule()
    def start_again(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def every_message_is_there_once(self) -> None:
        if hasattr(self, "held"):
            for name, said in self.held.items():
                assert visible(self.store, name) == said
            assert {info.name for info in self.store.sessions()} == self.held.keys()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


TestClient = Client.TestCase
TestClient.settings = settings(max_examples=rounds(20, 50), stateful_step_count=15, deadline=None)


@pytest.fixture
def histories(tmp_path: Path) -> Any:
    with kilburn.open(str(tmp_path / "a.db"), window=100_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        yield Histories(store)


def test_ids_marks_and_thoughts_do_not_matter(histories: Histories) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    first = [user("go"), {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}]
    name = turn(histories, [*first, {"role": "tool", "tool_call_id": "x", "content": "7"}], "done")
    other = {"id": "y", "type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    blocks = [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]
    again = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "", "tool_calls": [other]},
        {"role": "tool", "tool_call_id": "y", "content": "7"},
        {"role": "assistant", "content": "done\n"},
        user("more"),
    ]
    assert turn(histories, again, "yes") == name
    block = {"type": "tool_use", "id": "z", "name": "f", "input": {"b": 2, "a": 1}}
    result = {"type": "tool_result", "tool_use_id": "z", "content": [{"type": "text", "text": "7"}]}
    blocks = [
        user("go"),
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
        assistant("done"),
        user("more"),
        assistant("yes"),
        user("and in the other form"),
    ]
    assert turn(histories, blocks, "fine", form=MESSAGES) == name


def test_ids_that_are_counted_from_zero_in_every_reply(histories: Histories) -> None:
    def step(number: int) -> list[dict[str, Any]]:
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {number}}}'}}
        result = {"role": "tool", "tool_call_id": "call_0", "content": f"result {number}"}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}, result]

    talk = [user("go")]
    for number in range(3):
        talk += step(number)
        name = take(histories, talk)
        histories.give(name)
    prompt = name.session.render()
    ids = [message["tool_call_id"] for message in prompt if message["role"] == "tool"]
    assert ids[0] == "call_0"
    assert len(set(ids)) == 3
    assert [message["content"] for message in prompt if message["role"] == "tool"] == ["result 0", "result 1", "result 2"]


@pytest.mark.parametrize("again", [False, True], ids=["known", "restarted"])
@pytest.mark.parametrize("own", ["own{}", "own"])
def test_a_client_gives_calls_ids_of_its_own(histories: Histories, own: str, again: bool) -> None:
    def step(number: int, ids: str, results: str) -> list[dict[str, Any]]:
        calls = [{"id": f"{ids}{n}", "type": "function", "function": {"name": "f", "arguments": f"{number}{n}"}} for n in "01"]
        said = [{"role": "tool", "tool_call_id": f"{ids}{n}", "content": f"result {number}{n}"} for n in results]
        return [{"role": "assistant", "content": None, "tool_calls": calls}, *said]

    talk = [user("go")]
    for number in range(3):
        conversation = take(histories, talk)
        histories.said(conversation, parse(*step(number, f"theirs{number}", "")))
        histories.give(conversation)
        talk = [*talk, *step(number, own.format(number), "10")]
        histories = Histories(histories.store) if again else histories
        name = take(histories, talk)
        histories.give(name)
        talk.append(assistant("next"))
        histories.give(take(histories, talk))
        talk.append(user("go on"))
    assert name.name == conversation.name
    prompt = name.session.render()
    for number in range(3):
        for n in "01":
            [result] = [each for each in prompt if each.get("tool_call_id") == f"theirs{number}{n}"]
            assert result["content"] == f"result {number}{n}"


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("replies", ["aa", "ab", "a ", " a", "aab", "aba"])
def test_the_same_request_at_once_is_one_session_as_long_as_the_replies_are_the_same(
    histories: Histories, replies: str, known: bool
) -> None:
    before = [user("hi"), assistant("hello"), user("what?")] if known else []
    name = turn(histories, before[:1], "hello") if known else ""
    talk = [*before, user("how?")]
    asked = [take(histories, talk) for _ in replies]
    assert len({conversation.name for conversation in asked}) == 1
    for conversation, reply in zip(asked, replies, strict=True):
        if reply != " ":
            histories.said(conversation, parse(assistant(reply)))
    for conversation in asked:
        histories.give(conversation)
    words = dict.fromkeys(replies.replace(" ", ""))
    names = [info.name for info in histories.store.sessions()]
    assert len(names) == len(words)
    for again in (histories, Histories(histories.store)):
        went = [take(again, [*talk, assistant(reply), user("on")]) for reply in words]
        assert sorted(conversation.name for conversation in went) == sorted(names)
        assert not known or name in names
        for conversation in went:
            again.give(conversation)


@pytest.mark.parametrize("again", [False, True], ids=["known", "restarted"])
def test_a_client_that_did_not_hear_the_reply_asks_again(histories: Histories, again: bool) -> None:
    talk = [user("one"), assistant("1"), user("two")]
    name = turn(histories, talk[:1], "1")
    assert turn(histories, talk, "2") == name
    histories = Histories(histories.store) if again else histories
    assert turn(histories, talk, "2") == name
    assert turn(histories, [*talk, assistant("2"), user("three")], "3") == name
    assert visible(histories.store, name) == ["one", "1", "two", "2", "three", "3"]
    assert turn(histories, [*talk, assistant("2"), user("three")], "another 3") == f"{name}~2"
    assert visible(histories.store, f"{name}~2") == ["one", "1", "two", "2", "three", "another 3"]
    assert turn(histories, [*talk, assistant("2"), user("three"), assistant("3"), user("four")], "4") == name
    assert len(histories.store.sessions()) == 2


def test_many_threads_with_one_request_make_one_session(histories: Histories) -> None:
    def ask(_: int) -> str:
        return turn(histories, [user("hi"), assistant("hello"), user("what?")], "that")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(40)))) == 1
    [info] = histories.store.sessions()
    assert visible(histories.store, info.name) == ["hi", "hello", "what?", "that"]


def test_users_of_a_tenant_do_not_share_sessions(histories: Histories) -> None:
    assert turn(histories, [user("hi")], "a", of="ana") != turn(histories, [user("hi"), assistant("a"), user("b")], "b", of="bo")


def test_a_session_in_which_the_model_recalled_is_forked(histories: Histories) -> None:
    talk = [user("one"), assistant("1"), user("two")]
    hidden_turn(histories, talk, "2")
    turn(histories, [*talk, assistant("2"), user("three")], "3")
    conversation = take(histories, [*talk, assistant("2"), user("edited")])
    assert conversation.name.endswith("~2")
    [result] = [page for page in conversation.session.window.pages.values() if page.kind is Kind.RESULT]
    assert result.sources == (1,)


def test_a_damaged_session_stops_no_other_one_and_not_its_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.db"
    for round in ("before", "after"):
        with kilburn.open(str(path), window=100_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            histories = Histories(store)
            turn(histories, [user(f"fresh {round}")], "2")
            name = turn(histories, [user("the word sesame")], "1")
        path.write_bytes(path.read_bytes().replace(b"the word sesame", b"the word damage"))
    assert name.endswith("~2")
    assert "is skipped" in caplog.text


def test_a_name_of_the_client(histories: Histories) -> None:
    assert turn(histories, [user("hi")], "a", name="work") == "work"
    assert turn(histories, [user("hi"), assistant("a"), user("b")], "c", name="work") == "work"
    assert turn(histories, [user("other")], "c", name="work") == "work~2"


def test_an_error_leaves_the_session_as_it_was(histories: Histories) -> None:
    name = turn(histories, [user("hi")], "a")
    with pytest.raises(OrphanResult):
        take(histories, [user("hi"), assistant("a"), {"role": "tool", "tool_call_id": "none", "content": "x"}])
    assert turn(histories, [user("hi"), assistant("a"), user("b")], "c") == name
    assert visible(histories.store, name) == ["hi", "a", "b", "c"]


def test_a_session_that_has_nothing_yet_is_asked_again(histories: Histories) -> None:
    """A provider that refuses a request of nothing but a system prompt is asked again, then with a question."""
    system = {"role": "developer", "content": [[]]}
    for messages in ([system], [system], [system, user("Hi")], [system, user("Hi")]):
        conversation = take(histories, messages)
        assert conversation.session.window.turn == len(messages) - 1
        histories.give(conversation)
    assert len(histories.store.sessions()) == 1


def test_a_fork_of_a_fork(histories: Histories) -> None:
    base = [user("a"), assistant("1"), user("b"), assistant("2")]
    name = turn(histories, base[:1], "1")
    assert turn(histories, base[:3], "2") == name
    forked = [*base[:2], user("other b")]
    assert turn(histories, forked, "3") == f"{name}~2"
    again = [*forked, assistant("3"), user("c")]
    assert turn(histories, again, "4") == f"{name}~2"
    assert turn(histories, [*again[:-1], user("other c")], "5") == f"{name}~3"
    assert turn(histories, [*base, user("d")], "6") == name
    store = histories.store
    assert visible(store, name) == ["a", "1", "b", "2", "d", "6"]
    assert visible(store, f"{name}~2") == ["a", "1", "other b", "3", "c", "4"]
    assert visible(store, f"{name}~3") == ["a", "1", "other b", "3", "other c", "5"]


def test_many_forks_of_one_beginning_are_each_found_again(tmp_path: Path) -> None:
    path, count = str(tmp_path / "a.db"), 300
    options: dict[str, Any] = {"window": 100_000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}
    head = [user("a"), assistant("1")]
    with kilburn.open(path, **options) as store:
        histories = Histories(store)
        names = [turn(histories, [*head, user(f"try {number}")], f"reply {number}") for number in range(count)]
        assert len(set(names)) == count
        # More than are kept in memory: those that were put away are found by what they say.
        for number in (0, 7, 150, count - 1):
            more = [*head, user(f"try {number}"), assistant(f"reply {number}"), user("go on")]
            assert turn(histories, more, "yes") == names[number]
    with kilburn.open(path, **options) as store:
        histories = Histories(store)
        for number in (count - 2, 7):
            more = [*head, user(f"try {number}"), assistant(f"reply {number}"), user("go on"), assistant("yes"), user("and on")]
            more = more if number == 7 else more[:5]
            assert turn(histories, more, "yes") == names[number], "those that were used last are found after a restart"
        assert len(store.sessions()) == count


def opened(path: Path) -> kilburn.Store:
    return kilburn.open(str(path), window=100_000, policy="fifo", tokenizer="chars/4", embedder=None)


def test_gateways_on_one_file_go_on_with_each_others_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as one, opened(path) as two:
        both = [Histories(one), Histories(two)]
        talk, names = [user("a")], set()
        for number in range(6):
            names.add(turn(both[number % 2], talk, f"reply {number}"))
            talk += [assistant(f"reply {number}"), user(f"say {number}")]
        assert len(names) == 1
        [name] = names
        assert turn(both[1], [*talk[:5], user("another way")], "yes") == f"{name}~2"
        assert turn(both[0], [*talk[:5], user("another way"), assistant("yes"), user("on")], "so") == f"{name}~2"
        assert turn(both[0], [*talk[:3], user("a third way")], "no") == f"{name}~3"
        assert turn(both[1], talk, "last") == name
        assert {info.name for info in one.sessions()} == {name, f"{name}~2", f"{name}~3"}


def test_no_prompt_is_made_of_what_another_gateway_added_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as one, opened(path) as two:
        slow = take(Histories(one), [user("a")])
        turn(Histories(two), [user("a")], "a reply")
        with pytest.raises(StoreStale):
            slow.render("chat")


def test_a_name_that_another_gateway_took_is_not_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as one, opened(path) as two:
        slow = Histories(one)

        def open_late(name: str, owner: str) -> Session:
            turn(Histories(two), [user("a")], "a reply", name=name, of=owner)
            return one.session(name, owner)

        with pytest.raises(StoreStale):
            slow._unbegun(open_late, "work", "")
        assert slow._unbegun(one.session, "free", "").window.turn == 0


def test_no_reply_is_kept_to_a_question_that_the_database_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        histories = Histories(store)
        name = turn(histories, [user("a")], "a reply")
        talk = [user("a"), assistant("a reply"), user("b")]
        with lost(path):
            conversation = take(histories, talk)
        with pytest.raises(StoreUnavailable, match="lost the request"):
            histories.said(conversation, parse(assistant("another reply")))
        histories.give(conversation)
        assert visible(store, name) == ["a", "a reply"]
        assert turn(histories, talk, "another reply") == name
        assert visible(store, name) == ["a", "a reply", "b", "another reply"]


def test_sessions_whose_digests_are_not_kept_are_recognised_and_kept_from_then_on(tmp_path: Path) -> None:
    """Those of an older Kilburn, of a gateway that was killed, and of a file that was repaired."""
    path = tmp_path / "a.db"
    talk = [user("a"), assistant("1"), user("b")]
    with opened(path) as store:
        histories = Histories(store)
        name = turn(histories, talk[:1], "1")
        assert turn(histories, [*talk[:2], user("c")], "3") == name
        assert turn(histories, talk, "2") == f"{name}~2"
        assert store.backend.histories.missing(name, "", 9) == []
    with Sqlite(path) as file:
        assert repair_store(file) == []
    with opened(path) as store:
        assert set(store.backend.histories.missing(name, "", 9)) == {name, f"{name}~2"}
        assert turn(Histories(store), [*talk, assistant("2"), user("on")], "4") == f"{name}~2"
        assert store.backend.histories.missing(name, "", 9) == []
        assert turn(Histories(store), [*talk[:2], user("c"), assistant("3"), user("on")], "5") == name


@pytest.mark.parametrize("late", [False, True])
def test_no_digest_of_what_was_forgotten_stays_or_comes_again(tmp_path: Path, late: bool) -> None:
    path = tmp_path / "a.db"
    talk = [user("a"), assistant("1"), user("the number 4711"), assistant("2"), user("on")]
    with opened(path) as store:
        histories = Histories(store)
        name = turn(histories, talk[:1], "1")
        turn(histories, talk[:3], "2")
        conversation = take(histories, talk) if late else None
        digests = list(chained(canonical(parse(talk)), chain_seed(name, "")))
        assert store.backend.histories.owners(digests[2], 9)
        store.forget(session=name, address="p3")
        if conversation is not None:
            histories.said(conversation, parse(assistant("3")))
            histories.give(conversation)
            talk += [assistant("3"), user("and on")]
        for again in (histories, Histories(store)):
            assert turn(again, talk, "4") == name, "a client that still sends it goes on"
            talk += [assistant("4"), user("and on")]
            digests = list(chained(canonical(parse(talk)), chain_seed(name, "")))
            assert not any(store.backend.histories.owners(digest, 9) for digest in digests)
    assert not any(digest in file.read_bytes() for file in tmp_path.iterdir() for digest in digests)


def test_nobody_elses_session_is_found_by_the_same_words(histories: Histories) -> None:
    talk = [user("a"), assistant("1"), user("b")]
    names = {turn(histories, talk[:1], "1", name=name, of=who) for name in ("work", None) for who in ("ana", "bo")}
    assert len(names) == 4
    for name in ("work", None):
        for who in ("bo", "ana"):
            went = turn(histories, talk, "2", name=name, of=who)
            names.discard(went)
    assert not names
    assert len(histories.store.sessions()) == 4


def small(path: str) -> kilburn.Store:
    """A store with a window in which a few of these messages fit."""
    return kilburn.open(path, window=1_000, policy="fifo", tokenizer="chars/4", embedder=None)


def over_the_window(histories: Histories) -> tuple[list[dict[str, Any]], str]:
    """A conversation of which something has left the window, without its last reply, and its session's name."""
    talk: list[dict[str, Any]] = []
    for number in range(8):
        talk.append(user(f"question {number} " + "sand " * 80))
        name = turn(histories, talk, f"answer {number} " + "gold " * 40)
        talk.append(assistant(f"answer {number} " + "gold " * 40))
    return talk[:-1], name


def words_of(conversation: Conversation) -> str:
    """The texts of the prompt for the request that goes on now."""
    return "\n".join(str(message["content"]) for message in conversation.render("chat"))


@pytest.mark.parametrize("again", [False, True], ids=["known", "restarted"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_request_that_is_made_again_over_the_window_is_no_branch(tmp_path: Path, hidden: bool, again: bool) -> None:
    with small(str(tmp_path / "a.db")) as store:
        histories = Histories(store)
        talk, name = over_the_window(histories)
        last = "answer 7 " + "gold " * 40
        if hidden:
            talk = [*talk, assistant(last), user("and then?")]
            last = "then it is gold"
            assert hidden_turn(histories, talk, last) == name
        assert not store.session(name).window.whole
        before = store.session(name).window.last
        histories = Histories(store) if again else histories
        conversation = take(histories, talk)
        assert conversation.name == name
        assert last not in words_of(conversation)
        assert talk[-1]["content"] in words_of(conversation)
        assert conversation.render("chat").tokens <= 1_000
        histories.said(conversation, parse(assistant(last)))
        histories.give(conversation)
        assert hidden_turn(histories, talk, last) == name, "with or without a recall"
        assert store.session(name).window.last == before, "nothing was written"
        assert [info.name for info in store.sessions()] == [name]
        talk += [assistant(last), user("on")]
        assert turn(histories, talk, "yes") == name
        assert visible(store, name)[-3:] == [last, "on", "yes"]


@pytest.mark.parametrize("recalls", [False, True])
def test_other_words_over_the_window_are_a_branch(tmp_path: Path, recalls: bool) -> None:
    with small(str(tmp_path / "a.db")) as store:
        histories = Histories(store)
        talk, name = over_the_window(histories)
        said = visible(store, name)
        assert (hidden_turn if recalls else turn)(histories, talk, "something else") == f"{name}/b1"
        assert visible(store, name) == said
        assert visible(store, f"{name}/b1") == [*said[:-1], "something else"]
        if recalls:
            pages = store.session(f"{name}/b1").window.pages.originals()
            [result] = [page for page in pages if page.kind is Kind.RESULT]
            assert result.sources == (1,)
            assert result.cites == ((store.session(name).number, 1),)
        for path in (name, f"{name}/b1"):
            check_laws(store.session(path))


@pytest.mark.parametrize("replies", ["aa", "ab", "ba"])
def test_the_same_request_at_once_with_recalls_in_both(tmp_path: Path, replies: str) -> None:
    with small(str(tmp_path / "a.db")) as store:
        histories = Histories(store)
        talk, _ = over_the_window(histories)
        talk = [*talk, assistant("answer 7 " + "gold " * 40), user("and then?")]
        both = [take(histories, talk) for _ in replies]
        for round in "12":
            for at, conversation in enumerate(both):
                call = Part(kind=Kind.CALL, text='{"address":"p1"}', call=f"{HIDDEN}{round}{at}", name="recall")
                result = Part(kind=Kind.RESULT, text="recalled", call=call.call)
                said = [Message(role=Role.ASSISTANT, parts=(call,)), Message(role=Role.TOOL, parts=(result,), sources=(1,))]
                histories.said(conversation, said, more=True)
                assert conversation.render("chat").tokens <= 1_000
        for conversation, reply in zip(both, replies, strict=True):
            histories.said(conversation, parse(assistant(reply)))
        for conversation in both:
            histories.give(conversation)
        names = [info.name for info in store.sessions()]
        assert len(names) == len(set(replies))
        for reply in set(replies):
            assert turn(histories, [*talk, assistant(reply), user("on")], "yes") in names
        for each in names:
            check_laws(store.session(each))


def test_a_reply_whose_id_is_not_kept_is_not_acknowledged(tmp_path: Path) -> None:
    """A client that goes on by the id, through another gateway, would otherwise be answered without its past."""
    path = str(tmp_path / "a.db")
    with kilburn.open(path, embedder=None, tokenizer="chars/4") as store:
        histories = Histories(store)
        conversation = take(histories, [user("one")])
        histories.said(conversation, parse(assistant("two")))
        other = apsw.Connection(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="id of a reply"):
            histories.replied(conversation, "resp_1")
        other.execute("ROLLBACK")
        histories.replied(conversation, "resp_1")
        with kilburn.open(path, readonly=True, embedder=None, tokenizer="chars/4") as elsewhere:
            events = elsewhere.session(conversation.name).ledger.events(act=Act.NOTE)
            assert [event.data["turn"] for event in events if "reply" in event.data][-1] == 2


def test_a_history_that_ends_as_a_session_of_one_message_of_the_assistant(histories: Histories) -> None:
    greeted = take(histories, [assistant("How can I help?")])
    histories.give(greeted)
    other = take(histories, [user("Begin with a greeting."), assistant("How can I help?")])
    assert other.name != greeted.name
    assert visible(histories.store, greeted.name) == ["How can I help?"]
