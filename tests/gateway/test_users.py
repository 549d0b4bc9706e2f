"""The end users of an application, below one key: nothing of one of them is ever sent for another, or told to another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from kilburn.errors import InvalidMessage, SpecError
from kilburn.gateway.access import check_local
from kilburn.gateway.app import Settings, build
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.keys import Key, Link, add_key, read_keys
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.problems import Problem
from kilburn.gateway.users import below, client_user, requested_user
from kilburn.kernel.store import Store
from kilburn.testing.upstream import Sent, Upstream, calling, serving
from waiting import until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USERS = ("alice", "bob", "carol")
CANNED = "Thank you for your patience. Our team looks into every request, in the order in which they come. ".ljust(84) * 11
FILLER = "The parcel was late, and the box was wet. " * 6
WORDS = "canary parcel secret locker " + " ".join(USERS)

Json = dict[str, Any]


def secret(who: str) -> str:
    return f"canary-{who}-7d21"


def said(sent: Sent) -> Any:
    """A model that searches for everybody's secrets whenever it can, and always answers the same."""
    offered = [tool.get("name") or tool["function"]["name"] for tool in sent.body.get("tools", ())]
    last = (sent.body.get("messages") or sent.body.get("input") or [""])[-1]
    if "search_memory" in offered and isinstance(last, dict) and last.get("role") == "user" and "tool_result" not in str(last):
        named = [("recall", {"address": f"{name} p1"}) for name in ("main", "alice", "main~2")]
        return calling(("search_memory", {"query": WORDS}), *named)
    return CANNED


class House:
    """A gateway with one key, for an application with users."""

    def __init__(self, folder: Path, stack: ExitStack, *, key: Json | None = None, keyed: bool = True, **options: Any) -> None:
        self.upstream = Upstream(otherwise=said)
        file, self.db = folder / "keys.json", folder / "house.db"
        self.secret = add_key(file, Key(tenant="app", **(key or {})))[1] if keyed else "kilburn"
        self.tenant = "app" if keyed else "default"
        self.far = stack.enter_context(serving(self.upstream))
        given = {"db": str(self.db), "upstream": f"{self.far}/v1", "tokenizer": "chars/4", "embedder": None, "window": 1000}
        self.options: Json = {**given, "keys": str(file) if keyed else None, **options}
        self.http = stack.enter_context(httpx2.Client(timeout=600))
        self._stack = stack
        self.start()

    def start(self) -> None:
        self._running = ExitStack()
        self._stack.push(self._running)
        self.url = self._running.enter_context(serving(build(Settings(**self.options))))

    def again(self) -> None:
        self._running.close()
        self.start()

    def ask(self, path: str, body: Json, **headers: str) -> httpx2.Response:
        given = {"x-api-key": self.secret, **{f"x-kilburn-{name}": value for name, value in headers.items()}}
        return self.http.post(self.url + path, json={"model": "m", **body}, headers=given)

    def store(self) -> Store:
        return kilburn.open(str(self.db), window=1000, policy="fifo", tenant=self.tenant, tokenizer="chars/4", embedder=None)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    with ExitStack() as stack:
        yield lambda **options: House(tmp_path, stack, **options)


def talk(who: str, turns: int) -> list[Json]:
    """What a user said, to the application's last canned answer."""
    messages: list[Json] = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"Request {turn}: the secret of my locker is {secret(who)}. {FILLER}"}]
        messages += [{"role": "assistant", "content": CANNED if turn == turns - 1 else f"Noted, {who}: number {turn}."}]
    return messages


def open_(text: str = "And now?") -> Json:
    return {"role": "user", "content": text}


def check_apart(house: House, who: str, answer: httpx2.Response, since: int) -> None:
    told = answer.text + str(answer.headers) + "".join(sent.raw.decode() for sent in house.upstream.sent[since:])
    assert not [other for other in USERS if other != who and secret(other) in told], f"{who} was told what another said"


@pytest.mark.parametrize("names", [("alice", "bob"), ("main", "main"), ("", "")])
@pytest.mark.parametrize("wall", ["none", "header", "user"])
@pytest.mark.parametrize("person", [False, True])
def test_one_canned_answer_links_nobody_to_somebody_else(
    house: Callable[..., House], person: bool, wall: str, names: tuple[str, str]
) -> None:
    if person and wall == "none" and names != ("alice", "bob"):
        pytest.skip("a key of one person, who says nothing else: these are both that person's")
    it = house(key={"user": "ana"} if person else None)

    def ask(who: str, name: str, messages: list[Json]) -> httpx2.Response:
        headers = ({"session": name} if name else {}) | ({"user": who} if wall == "header" else {})
        return it.ask(CHAT, {"messages": messages, **({"user": who} if wall == "user" else {})}, **headers)

    history = talk("alice", 8)
    assert ask("alice", names[0], history[:-1]).status_code == 200
    assert ask("alice", names[0], [*history, open_()]).status_code == 200
    since = len(it.upstream.sent)
    own = [open_(f"Hello, I am Bob. {FILLER}"), {"role": "assistant", "content": CANNED}, open_()]
    check_apart(it, "bob", ask("bob", names[1], own), since)
    check_apart(it, "bob", ask("bob", names[1], [*own, {"role": "assistant", "content": CANNED}, open_("?")]), since)


def compacted(it: House, path: str = CHAT, /, **headers: str) -> tuple[int, ...]:
    """The sessions that a history is linked to which its client has compacted: a note for the middle, and the last turns."""
    talked = talk("alice", 8)
    it.ask(path, {"messages": talked[:-1]}, **headers)
    answer = it.ask(path, {"messages": [open_("[Older messages were left out.]"), *talked[-4:], open_("Go on.")]}, **headers)
    assert answer.status_code == 200, answer.text
    with it.store() as store:
        session = store.session(answer.headers["x-kilburn-session"], store_user(headers))
        return tuple(session.branches.origin().get("continues", ()))


def store_user(headers: Json) -> str:
    return f"/{headers['user']}" if "user" in headers else ""


@pytest.mark.parametrize(
    ("keyed", "key", "gateway", "user", "linked"),
    [
        (False, {}, "auto", "", True),
        (True, {}, "auto", "", False),
        (True, {}, "auto", "alice", True),
        (True, {"link": Link.ON}, "auto", "", True),
        (True, {}, "on", "", True),
        (True, {"link": Link.OFF}, "on", "alice", False),
        (True, {"link": Link.ON}, "off", "alice", False),
        (False, {}, "off", "", False),
    ],
)
def test_sessions_are_linked_where_it_is_known_whose_they_are(
    house: Callable[..., House], keyed: bool, key: Json, gateway: str, user: str, linked: bool
) -> None:
    it = house(keyed=keyed, key=key, link=gateway)
    assert bool(compacted(it, **({"user": user} if user else {}))) is linked


def test_a_named_session_goes_on_from_itself_alone(house: Callable[..., House]) -> None:
    it = house(keyed=False)
    assert compacted(it, session="work")
    talked = talk("alice", 8)
    for name in ({"session": "other"}, {}):
        answer = it.ask(CHAT, {"messages": [*talked[-2:], open_("Go on.")]}, **name)
        with it.store() as store:
            assert store.session(answer.headers["x-kilburn-session"]).branches.origin().get("continues", []) == []


def test_links_that_are_switched_off_later_are_not_followed(house: Callable[..., House]) -> None:
    it = house(keyed=False)
    assert compacted(it)
    it.options["link"] = "off"
    it.again()
    before = it.upstream.sent[-1].raw.count(b"from the earlier session")
    assert before, "what the session was told itself stays its own"
    messages = [*talk("alice", 8)[-4:], open_("Go on."), {"role": "assistant", "content": CANNED}, open_("More.")]
    it.ask(CHAT, {"messages": messages})
    assert it.upstream.sent[-1].raw.count(b"from the earlier session") <= before


def test_no_such_link() -> None:
    with pytest.raises(SpecError, match="link 'perhaps'"):
        build(Settings(upstream="http://127.0.0.1:9", link="perhaps"))


# Who is told

KEY, ANA = Key(name="0" * 8, tenant="app"), Key(name="0" * 8, tenant="app", user="ana")
HEX, UUID = "ab" * 32, "123e4567-e89b-12d3-a456-42661417400"
OLD = [f"user_{HEX}_account__session_{UUID}{n}" for n in range(2)]
NEW = [json.dumps({"device_id": HEX, "account_uuid": "", "session_id": f"{UUID}{n}"}) for n in range(2)]


def of(body: Any, header: str = "", key: Key = KEY) -> str:
    return requested_user({"x-kilburn-user": header} if header else {}, json.dumps(body).encode(), key)


def test_the_header_wins_and_each_field_tells_the_same_user() -> None:
    ways = [of({}, "alice"), of({"user": "alice"}), of({"safety_identifier": "alice"}), of({"metadata": {"user_id": "alice"}})]
    assert set(ways) == {"alice"}
    assert of({"user": "bob", "metadata": {"user_id": "carol"}}, "alice") == "alice"
    assert of({"user": "alice", "safety_identifier": "alice"}) == "alice"
    assert of({"user": None, "metadata": None}) == of({"metadata": {"user_id": None}}) == of({"user": ""}) == of([]) == ""
    with pytest.raises(SpecError, match="UTF-8"):
        requested_user({"x-kilburn-user": "\xff"}, b"{}", KEY)


def test_no_two_users_have_one_name() -> None:
    values: list[Any] = ["a", "b", "a/b", "/a", "a&b", "a%2Fb", "%", " a", "A", "ä", "x" * 300, "x" * 301, 5, 5.5, [5], {"a": 1}]
    values += ["..", "~2", "@memory", "a~2", "device=a", "\0", "\n"]
    bodies = [{"user": value} for value in values] + [{"user": "a", "safety_identifier": "b"}]
    names = [below(key, of(body), Link.AUTO).user for body in bodies for key in (KEY, ANA)]
    names += ["", "ana", below(Key(user="a/b"), "c", Link.AUTO).user, below(Key(user="a"), "b%2Fc", Link.AUTO).user]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 400


def test_what_is_no_text_is_a_user_too_or_is_refused() -> None:
    names = [requested_user({}, body, KEY) for body in (b'{"user": "\xff"}', b'{"\\u0075ser": "a"}', b'{"metadata": "b"}')]
    assert names == ["%22%5Cxff%22", "a", "b"]
    for value in (b'"\\ud800"', b'{"user_id": "\\udc00"}'):
        body = b'{"messages": [{"role": "user", "content": "x"}], "metadata": ' + value + b"}"
        with pytest.raises(InvalidMessage):
            ChatForm().open(body)


def test_what_claude_code_says_of_itself_is_a_device_and_under_a_persons_key_nobody() -> None:
    for both in (OLD, NEW):
        one, other = (of({"metadata": {"user_id": said}}) for said in both)
        assert one == other != ""
        assert of({"metadata": {"user_id": both[0]}}, key=ANA) == of({"metadata": {"user_id": both[0]}}, key=Key()) == ""
        assert of({"metadata": {"user_id": both[0]}}, "bob", ANA) == "bob"
    assert of({"metadata": {"user_id": "alice"}}, key=ANA) == "alice"


def test_a_keys_own_user_is_none_below_a_key(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="begins with /"):
        add_key(tmp_path / "keys.json", Key(user="/alice"))
    add_key(tmp_path / "keys.json", Key(link=Link.OFF))
    assert [key.link for key in read_keys(tmp_path / "keys.json")] == [Link.OFF]


# What a provider keeps


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["header", "user", "safety_identifier"])
def test_a_chain_at_the_provider_belongs_to_who_began_it(house: Callable[..., House], way: str, stream: bool) -> None:
    it = house()

    def ask(who: str, **more: Any) -> httpx2.Response:
        body = {"input": f"I am {who}: {secret(who)}", "stream": stream, **more}
        if way == "header":
            return it.ask(RESPONSES, body, **({"user": who} if who else {}))
        return it.ask(RESPONSES, {**body, **({way: who} if who else {})})

    first = name_of(ask("alice"))
    second = name_of(ask("alice", previous_response_id=first))
    for again in (False, True):
        if again:
            it.again()
        asked = len(it.upstream.sent)
        for name in (first, second):
            for more in ({"previous_response_id": name}, {"conversation": name}, {"conversation": {"id": name}}):
                for who in ("bob", ""):
                    assert ask(who, **more).status_code == 404
            referred = [{"type": "item_reference", "id": name}, open_()]
            assert ask("bob", input=referred).status_code == 404
            for item in (
                {"id": name},
                {"type": "reasoning", "id": name, "summary": []},
                {"type": "item\u005freference", "id": name},
            ):
                assert ask("bob", input=[item, open_()]).status_code == 404
            odd = f'{{"input": "?", "previous_response_id": "{name}", "top_p": NaN}}'
            given = {"x-api-key": it.secret, "x-kilburn-user": "bob", "x-kilburn": "off"}
            assert it.http.post(it.url + RESPONSES, content=odd, headers=given).status_code == 400
            for method in ("GET", "DELETE"):
                given = {"x-api-key": it.secret, "x-kilburn-user": "bob"}
                assert it.http.request(method, f"{it.url}/v1/responses/{name}", headers=given).status_code == 404
        assert len(it.upstream.sent) == asked
        assert ask("alice", previous_response_id=second).status_code == 200
    off = it.ask(RESPONSES, {"input": "?", "previous_response_id": first}, user="bob", session="x")
    assert off.status_code == 404
    begun = "conv_of_the_app"
    ask("carol", conversation=begun)
    assert ask("bob", conversation=begun).status_code == 404


def name_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.splitlines() if line.startswith("data:") and '"response.completed"' in line]
        assert lines, answer.text[-2000:]
        line = lines[-1]
        return str(json.loads(line[5:])["response"]["id"])
    return str(answer.json()["id"])


# What a user may take


def test_a_user_takes_a_share_and_the_others_do_not_pay_for_it(house: Callable[..., House]) -> None:
    it = house(key={"rate": 96}, limits=RequestBounds())  # at once: 24 of the key, 6 of a user

    def ask(who: str, way: str) -> int:
        body = {"messages": [open_(f"I am {who}.")], **({"user": who} if way == "user" else {})}
        return it.ask(CHAT, body, **({"user": who} if way == "header" else {})).status_code

    flood = [ask("alice", ("user", "header")[at % 2]) for at in range(60)]
    assert {*flood} == {200, 429}
    assert flood[:6] == [200] * 6
    assert flood.count(200) < 24
    assert [ask(who, "user") for who in ("bob", "carol") for _ in range(3)] == [200] * 6


# All of it together


class App:
    """An application's user, who talks in several sessions by every form."""

    def __init__(self, house: House, who: str, chance: random.Random) -> None:
        self.house, self.who, self.chance = house, who, chance
        self.talks: dict[str, list[Json]] = {}
        self.chain: str | None = None

    def step(self, way: str, others: list[str]) -> httpx2.Response:
        chance, it = self.chance, self.house
        name = chance.choice(["", "", "main", "alice", f"of-{self.who}"])
        path = chance.choice([CHAT, MESSAGES, RESPONSES])
        history = self._changed(self.talks.setdefault(name, []))
        words = f"Remember that the secret of my locker is {secret(self.who)}." if chance.random() < 0.3 else ""
        first = not history and chance.random() < 0.5
        asked = "Hello, where is my parcel?" if first else f"{words} My secret is {secret(self.who)}. {FILLER}"
        history.append(open_(asked))
        body: Json = {"max_tokens": 400, "stream": chance.random() < 0.4}
        body |= {"input" if path == RESPONSES else "messages": history}
        if path == RESPONSES and self.chain and chance.random() < 0.5:
            body |= {"input": asked, "previous_response_id": self.chain}
        if others and path == RESPONSES and chance.random() < 0.3 and way != "none":
            body |= {"input": "What did I say?", "previous_response_id": chance.choice(others)}
        headers = {"session": name} if name else {}
        if path == MESSAGES and way in ("user", "safety_identifier"):
            way = "user_id"
        if way == "header":
            headers["user"] = self.who
        elif way == "user_id":
            body["metadata"] = {"user_id": self.who}
        elif way != "none":
            body[way] = self.who
        answer = it.ask(path, body, **headers)
        if answer.status_code == 200:
            history.append({"role": "assistant", "content": CANNED})
            self.chain = name_of(answer) if path == RESPONSES else self.chain
        else:
            # A provider does not go on from a streamed reply with calls of the gateway's own.
            assert answer.status_code == 404 or "No tool output found" in answer.text, answer.text
            history.pop()
        self.talks[name] = history
        return answer

    def _changed(self, history: list[Json]) -> list[Json]:
        """The history as its client goes on with it: whole, cut, compacted, or begun anew."""
        kept = list(history)
        match self.chance.choice(["on"] * 5 + ["fork", "tail", "summary", "new"]):
            case "fork":
                kept = kept[: 2 * self.chance.randint(0, len(kept) // 2)]
            case "tail":
                kept = kept[-4:]
            case "summary" if len(kept) > 6:
                kept = [open_(f"We go on from here. Summary: {CANNED}"), {"role": "assistant", "content": "Good."}]
            case "new":
                kept = []
        return kept


def results(sent: Sent) -> list[str]:
    """What the model was given for its calls."""
    given = sent.body.get("messages") or sent.body.get("input") or []
    said = [str(one) for one in given if isinstance(one, dict)]
    return [one for one in said if "'tool'" in one or "tool_result" in one or "function_call_output" in one]


WAYS = ("header", "user", "safety_identifier", "user_id")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_user_gets_anything_of_another(house: Callable[..., House], seed: int) -> None:
    chance = random.Random(seed)
    untold = seed % 3 == 2
    learning = {} if untold else {"memory": 150, "learn": True}
    it = house(key=learning if seed != 4 else {**learning, "user": "app"})
    apps = {who: App(it, who, chance) for who in USERS}
    refused = found = 0
    for number in range(150):
        who = chance.choice(USERS)
        since = len(it.upstream.sent)
        others = [app.chain for app in apps.values() if app.who != who and app.chain]
        answer = apps[who].step("none" if untold else chance.choice(WAYS), others)
        refused += answer.status_code == 404
        check_apart(it, who, answer, since)
        found += any(secret(who) in result for sent in it.upstream.sent[since:] for result in results(sent))
        if number in (60, 110):
            it.again()
    # Without these the test could not fail.
    assert found
    assert untold or refused
    with it.store() as store:
        linked = [info.name for info in store.sessions() if store.session(info.name).branches.origin().get("continues")]
        assert bool(linked) is not untold
        facts = [collection.info.user for collection in store.collections() if collection.info.pages]
        assert untold or len(facts) > 1


# Without gateway keys

LOCKER = "locker is number 7301"


@pytest.mark.parametrize("one_user", [False, True])
@pytest.mark.parametrize(("path", "header", "named"), [(CHAT, "authorization", ""), (MESSAGES, "x-api-key", "alice")])
def test_each_provider_key_is_a_user_without_gateway_keys(
    house: Callable[..., House], path: str, header: str, named: str, one_user: bool
) -> None:
    it = house(keyed=False, memory=300, one_user=one_user)

    def ask(credential: str, *messages: Json, session: str = "") -> httpx2.Response:
        headers = {header: f"Bearer {credential}" if header == "authorization" else credential}
        headers |= {"x-kilburn-user": named} if named else {}
        headers |= {"x-kilburn-session": session} if session else {}
        body = {"model": "m", "messages": [open_("Hello, please help me with my locker."), *messages], "max_tokens": 90}
        answer = it.http.post(it.url + path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def sees_locker(credential: str, answer: httpx2.Response) -> bool:
        headers = {"x-api-key": credential} | ({"x-kilburn-user": named} if named else {})
        sent = "".join(each.raw.decode() for each in it.upstream.sent[since:])
        rows = it.http.get(f"{it.url}/sessions", headers=headers).json()["sessions"]
        verbs = it.http.get(f"{it.url}/sessions/{session}/preview", headers=headers).status_code == 200
        assert verbs is any(row["session"] == session for row in rows)
        assert verbs is (LOCKER in answer.text + sent)
        return verbs

    telling: list[Json] = [{"role": "assistant", "content": CANNED}]
    telling += [open_(f"I live in Porto. Please remember that my {LOCKER}."), {"role": "assistant", "content": CANNED}]
    session = ask("key-of-ann", *telling[:2], session="main").headers["x-kilburn-session"]
    with it.store() as store:
        owner = next(info.user for info in store.sessions() if info.name == session)

    def learned() -> bool:
        with it.store() as store:
            return any(collection.info.user == owner and collection.info.pages for collection in store.collections())

    until(learned)
    question = [{"role": "assistant", "content": CANNED}, open_("What is the number of my locker?")]
    since = len(it.upstream.sent)
    assert sees_locker("key-of-ann", ask("key-of-ann", *question, session="other"))
    since = len(it.upstream.sent)
    assert sees_locker("key-of-bob", ask("key-of-bob", *question, session="main")) is one_user
    assert b"key-of-ann" not in it.db.read_bytes()
    assert owner == (f"/{named}" if named else "") if one_user else owner != named


def test_all_sessions_are_shown_to_the_operator_of_this_machine_alone(house: Callable[..., House]) -> None:
    it = house(keyed=False)
    body = {"model": "m", "messages": [open_("Hello.")]}
    session = it.http.post(it.url + CHAT, json=body, headers={"x-api-key": "key-of-ann"}).headers["x-kilburn-session"]
    for path in ("/sessions", f"/sessions/{session}/preview"):
        for forwarded, credential, status in (
            ({}, "", 200),
            ({"x-forwarded-for": "192.0.2.1"}, "", 403),
            ({"via": "1.1 proxy"}, "none", 403),
            ({"x-forwarded-for": "192.0.2.1", "x-kilburn-user": "ann"}, "", 403),
            ({"x-forwarded-for": "192.0.2.1"}, "key-of-ann", 200),
        ):
            assert it.http.get(it.url + path, headers={**forwarded, "x-api-key": credential}).status_code == status
    for address in ("192.0.2.1", ""):
        with pytest.raises(Problem):
            check_local({"client": (address, 1), "headers": []})


def test_a_credential_is_one_user_in_whichever_header_and_a_stand_in_is_none() -> None:
    bearer, key = client_user([(b"authorization", b"bearer  k1 ")]), client_user([(b"x-api-key", b"k1")])
    assert bearer == key == client_user([(b"api-key", b"k1"), (b"x-other", b"k2")]) != ""
    assert "k1" not in key
    names = {key, client_user([(b"x-api-key", b"k2")]), client_user([(b"authorization", b"Basic k1")]), client_user([])}
    names |= {client_user([(b"x-api-key", b"k1"), (b"authorization", b"Bearer k2")])}
    assert len(names) == 5
    assert client_user([(b"authorization", b"Bearer kilburn"), (b"x-api-key", b"none")]) == client_user([]) == ""


def test_one_user_and_keys_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="leave --one-user out"):
        build(Settings(upstream="http://127.0.0.1:9", keys=str(tmp_path / "keys.json"), one_user=True))
