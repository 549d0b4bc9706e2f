"""A model that takes no tools: it is asked without ours, and what has left the window is searched for the user's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from cli.terminal import kilburn as program
from kilburn.errors import Refused, SpecError
from kilburn.event import Act
from kilburn.gateway.app import Settings, build
from kilburn.models.echo import Echo
from kilburn.page import Place
from kilburn.testing.upstream import Break, Refusal, Upstream, calling

FORMS = ("chat", "messages", "responses")
VLLM = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
REFUSALS = (
    (400, VLLM),
    (400, "registry.ollama.ai/library/gemma:2b does not support tools"),
    (400, "tools is not supported in this model. For a list of supported models see the guide"),
    (400, "Unrecognized request argument supplied: tools"),
    (400, "This model doesn't support tool use in streaming mode."),
    (422, "tools: Extra inputs are not permitted"),
    (404, "No endpoints found that support tool use."),
    (500, "tools param requires --jinja flag"),
)
OWN = {
    "chat": {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}},
    "messages": {"name": "read", "input_schema": {"type": "object", "properties": {}}},
    "responses": {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False},
}
RIVERS = [
    "Arno",
    "Besos",
    "Clyde",
    "Douro",
    "Ebro",
    "Forth",
    "Garonne",
    "Hudson",
    "Indus",
    "Jordan",
    "Kama",
    "Loire",
    "Meuse",
    "Niger",
    "Oder",
    "Plate",
    "Rhone",
    "Severn",
    "Tiber",
    "Ural",
    "Volga",
    "Weser",
    "Yukon",
    "Zambezi",
    "Aare",
    "Bug",
    "Cam",
    "Dee",
    "Elbe",
    "Fal",
    "Glomma",
    "Han",
    "Isar",
    "Jhelum",
    "Kasai",
    "Lena",
    "Main",
    "Neman",
    "Ohio",
    "Piave",
]


def takes_none(said: Any = "Noted.", words: str = VLLM, status: int = 400) -> Upstream:
    """A server without tool choice."""
    return Upstream(otherwise=lambda sent: Refusal(status=status, words=words) if sent.body.get("tools") else said)


def line(number: int) -> str:
    river = RIVERS[number % len(RIVERS)]
    return f"Turn {number}: the ferry on the {river} costs {number + 11} pence. " + "It carries sand and gold. " * 12


def ask(setup: Any, form: str, given: list[dict[str, Any]], *, streamed: bool = False, **more: Any) -> str:
    """The text of a reply, by the SDK of the form."""
    if form == "messages":
        if not streamed:
            whole = setup.anthropic.messages.create(model="m", max_tokens=99, messages=given, **more)
            return "".join(block.text for block in whole.content if block.type == "text")
        with setup.anthropic.messages.stream(model="m", max_tokens=99, messages=given, **more) as events:
            return str(events.get_final_text())
    if form == "chat":
        if not streamed:
            return str(setup.openai.chat.completions.create(model="m", messages=given, **more).choices[0].message.content)
        chunks = list(setup.openai.chat.completions.create(model="m", messages=given, stream=True, **more))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    if not streamed:
        return str(setup.openai.responses.create(model="m", input=given, **more).output_text)
    with setup.openai.responses.stream(model="m", input=given, **more) as events:
        return str(events.get_final_response().output_text)


def talk_on(setup: Any, form: str, turns: int, history: list[dict[str, Any]] | None = None, **more: Any) -> list[dict[str, Any]]:
    """The history of a conversation of so many turns."""
    history = [] if history is None else history
    for number in range(turns):
        history.append({"role": "user", "content": line(number)})
        history.append({"role": "assistant", "content": ask(setup, form, history, **more)})
    return history


def texts(sent: Any) -> str:
    return json.dumps(sent.body, ensure_ascii=False)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
def test_every_turn_of_a_long_talk_is_answered(
    gateway: Callable[..., Any], form: str, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    setup = gateway(upstream=takes_none(), form="messages" if form == "messages" else "chat", window=1200)
    history = talk_on(setup, form, 16, streamed=streamed)
    assert {message["content"] for message in history if message["role"] == "assistant"} == {"Noted."}
    upstream = setup.upstream
    refused = [sent for sent in upstream.prompts if sent.status == 400]
    assert len(refused) == 1, "it is remembered"
    assert len(upstream.prompts) == 17
    assert not upstream.refused
    assert [record.levelname for record in caplog.records if "takes no tools" in record.getMessage()] == ["WARNING"], "said once"

    history.append({"role": "user", "content": "What did the ferry on the Besos cost?"})
    ask(setup, form, history, streamed=streamed)
    asked = texts(upstream.prompts[-1])
    assert "the ferry on the Besos costs 12 pence" in asked, "what has left the window is searched for the user's words"
    assert "tools" not in upstream.prompts[-1].body
    with setup.store() as store:
        assert len(store.sessions()) == 1
        session = store.session(store.sessions()[0].name)
        last = session.window.pages[session.window.last]
        found = [page for page in last.sources if "Besos" in session.contents.text(page)]
        assert found, "the answer cites what it was answered from"
        assert "Noted." in [hit.text for hit in session.search("Noted", 500)], "and is found like any other"
        counted = [event.data["counted"] for event in session.ledger.events() if event.act is Act.USAGE]
        assert all(tokens <= 1200 for tokens in counted), "what is brought counts, and fits"
        assert session.stats().overflow == 0


@pytest.mark.parametrize(("status", "words"), REFUSALS, ids=[words[:24] for _, words in REFUSALS])
def test_the_words_of_many_servers_are_understood(gateway: Callable[..., Any], status: int, words: str) -> None:
    setup = gateway(upstream=takes_none(words=words, status=status), window=1000)
    talk_on(setup, "chat", 10)
    assert [sent.status for sent in setup.upstream.prompts].count(200) == 10
    assert len(setup.upstream.prompts) == 11


@pytest.mark.parametrize("form", FORMS)
def test_the_error_that_the_clients_own_tools_cause_is_the_clients(gateway: Callable[..., Any], form: str) -> None:
    setup = gateway(upstream=takes_none(), form="messages" if form == "messages" else "chat", window=1000)
    history = talk_on(setup, form, 10)
    before = len(setup.upstream.prompts)
    with pytest.raises(Exception, match="auto-tool-choice"):
        ask(setup, form, [*history, {"role": "user", "content": line(10)}], tools=[OWN[form]])
    (last,) = setup.upstream.prompts[before:]
    assert len(last.body["tools"]) == 1, "neither removed nor joined by ours"


@pytest.mark.parametrize("form", FORMS)
def test_tools_of_the_client_alone_are_refused_once_and_not_taken_away(gateway: Callable[..., Any], form: str) -> None:
    setup = gateway(upstream=takes_none(), form="messages" if form == "messages" else "chat", window=1000)
    history = [{"role": role, "content": line(number)} for number in range(12) for role in ("user", "assistant")]
    with pytest.raises(Exception, match="auto-tool-choice"):
        ask(setup, form, [*history, {"role": "user", "content": "?"}], tools=[OWN[form]])
    assert [len(sent.body["tools"]) for sent in setup.upstream.prompts] == [3, 1], "repeated without ours"
    # Without them the same talk goes on, and only then is it known.
    assert ask(setup, form, [*history, {"role": "user", "content": "?"}]) == "Noted."


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_a_refusal_at_the_beginning_of_a_stream_is_noticed_too(gateway: Callable[..., Any], form: str) -> None:
    def say(sent: Any) -> Any:
        return Break(how="error", after=0, error=Refusal(words=VLLM)) if sent.body.get("tools") else "Noted."

    upstream = Upstream(otherwise=say)
    setup = gateway(upstream=upstream, form=form, window=1000)
    history = talk_on(setup, form, 12, streamed=True)
    assert {message["content"] for message in history if message["role"] == "assistant"} == {"Noted."}
    assert len([sent for sent in upstream.prompts if sent.body.get("tools")]) == 1


def test_a_client_of_the_other_form_is_answered_too(gateway: Callable[..., Any], tmp_path: Path) -> None:
    for form, other in (("chat", "messages"), ("messages", "chat")):
        setup = gateway(upstream=takes_none(), form=form, window=1000, db=str(tmp_path / f"{form}.db"))
        for streamed in (False, True):
            history = talk_on(setup, other, 12, streamed=streamed)
            assert {message["content"] for message in history if message["role"] == "assistant"} == {"Noted."}
        assert len([sent for sent in setup.upstream.prompts if sent.status == 400]) == 1


def test_each_model_of_an_upstream_is_remembered_by_itself(gateway: Callable[..., Any]) -> None:
    def say(sent: Any) -> Any:
        return Refusal(words=VLLM) if sent.body.get("tools") and sent.body["model"] == "small" else "Noted."

    setup = gateway(upstream=Upstream(otherwise=say), window=1000)
    history = [{"role": role, "content": line(number)} for number in range(12) for role in ("user", "assistant")]
    for model in ("small", "large", "small", "large"):
        history.append({"role": "user", "content": "?"})
        reply = setup.openai.chat.completions.create(model=model, messages=history)
        history.append({"role": "assistant", "content": reply.choices[0].message.content})
    asked = [(sent.body["model"], bool(sent.body.get("tools"))) for sent in setup.upstream.prompts]
    assert asked == [("small", True), ("small", False), ("large", True), ("small", False), ("large", True)]


def test_the_operator_may_switch_them_on_or_off(gateway: Callable[..., Any]) -> None:
    never = gateway(upstream=Upstream(otherwise="Noted."), window=1000, memory_tools="off")
    talk_on(never, "chat", 12)
    assert not [sent for sent in never.upstream.prompts if sent.body.get("tools")]
    assert any("<recalled-" in texts(sent) for sent in never.upstream.prompts)
    always = gateway(upstream=takes_none(), window=1000, memory_tools="on")
    with pytest.raises(openai.BadRequestError, match="auto-tool-choice"):
        talk_on(always, "chat", 12, [{"role": "user", "content": "Another talk."}, {"role": "assistant", "content": "Yes."}])
    with pytest.raises(SpecError, match="auto, on, off"):
        build(Settings(db=":memory:", upstream="http://127.0.0.1:9/v1", memory_tools="perhaps"))


class Plain(Echo):
    """A model that runs here and takes no tools, as one whose template has no place for them."""

    takes_tools = False

    def stream(self, request: Any) -> Any:
        if request.tools:
            raise Refused("no place for tools")
        return super().stream(request)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_this_process_is_never_asked_with_ours(gateway: Callable[..., Any], form: str, streamed: bool) -> None:
    setup = gateway(model=Plain(), window=1200)
    talk_on(setup, form, 12, streamed=streamed)
    with pytest.raises(SpecError, match="takes no tools"):
        build(Settings(db=":memory:", model=Plain(), memory_tools="on"))


def test_what_was_brought_is_named_and_forgotten_with_what_it_is_from(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=takes_none(), window=1200)
    history = talk_on(setup, "chat", 20)
    setup.upstream.enqueue("It cost 12 pence.")
    history.append({"role": "user", "content": "What did the ferry on the Besos cost?"})
    reply, headers = setup.chat(history)
    assert "p3" in headers["x-kilburn-brought"].split(", ")
    history.append({"role": "assistant", "content": reply.choices[0].message.content})
    with setup.store() as store:
        session = store.session(store.sessions()[0].name)
        answer = session.window.last
        assert f"p{answer}" in session.forget("p3")
        assert session.window.at(answer) is Place.DROPPED
    history.append({"role": "user", "content": "And on the Besos today?"})
    setup.chat(history)
    assert "12 pence" not in texts(setup.upstream.prompts[-1])


def test_a_source_that_is_forgotten_while_the_model_speaks_takes_the_answer_along(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=takes_none(), window=1200)
    history = talk_on(setup, "chat", 20)

    def forget(sent: Any) -> str:
        with setup.store() as store:
            store.session(store.sessions()[0].name).forget("p3")
        return "It cost 12 pence."

    setup.upstream.enqueue(forget)
    history.append({"role": "user", "content": "What did the ferry on the Besos cost?"})
    setup.chat(history)
    with setup.store() as store:
        for info in store.sessions():
            session = store.session(info.name)
            assert not [message for message in session.contents.messages() if "It cost 12" in json.dumps(message)]


def test_what_an_earlier_session_said_is_brought_too(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=takes_none(), window=1500)
    history = talk_on(setup, "chat", 12)
    summary = "So far: we spoke of ferries. " + "Each river has a ferry, and each ferry has its price, written down. " * 9
    setup.upstream.enqueue(summary)
    history.append({"role": "user", "content": "Sum up."})
    setup.chat(history)
    reply, headers = setup.chat([
        {"role": "user", "content": f"We go on. {summary}"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "What did the ferry on the Besos cost?"},
    ])  # fmt: skip
    assert reply.choices[0].message.content == "Noted."
    assert "costs 12 pence" in texts(setup.upstream.prompts[-1])
    assert " p3" in headers["x-kilburn-brought"]


def test_a_call_that_a_model_makes_up_is_the_clients(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=takes_none(), window=1000)
    history = talk_on(setup, "chat", 12)
    setup.upstream.enqueue(calling(("recall", {"address": "p1"})))
    reply, _ = setup.chat([*history, {"role": "user", "content": "?"}])
    assert reply.choices[0].message.tool_calls[0].function.name == "recall"


def test_the_store_is_sound_afterwards(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=takes_none(), window=1000)
    talk_on(setup, "chat", 25)
    done = program("fsck", "--db", setup.db)
    assert done.status == 0, done.err + done.out
