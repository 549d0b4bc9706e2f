"""OpenAI's responses API through the gateway, by the official SDK."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from kilburn.gateway.app import Settings, build
from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import Upstream, calling, serving

FILLER = "The river carries sand, and the sand carries gold. "
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}


def talk(turns: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number in range(turns):
        out.append({"role": "user", "content": f"Question {number}. " + FILLER * 10})
        out.append({"role": "assistant", "content": f"Answer {number}. " + FILLER * 10})
    return out


def ask(setup: Any, given: Any, *, streamed: bool, **more: Any) -> Any:
    if not streamed:
        return setup.openai.responses.create(model="m", input=given, **more)
    events = list(setup.openai.responses.create(model="m", input=given, stream=True, **more))
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert events[-1].type == "response.completed"
    told = [event.response.tools for event in events if hasattr(event, "response")]
    assert len(told) == 3
    assert all(tools == told[-1] for tools in told)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in events[-1].response.output]
    assert len({event.output_index for event in events if event.type == "response.output_item.added"}) == len(done)
    return events[-1].response


@pytest.mark.parametrize("streamed", [False, True])
def test_a_short_conversation_goes_through(gateway: Any, streamed: bool) -> None:
    setup = gateway(calling(("read", {"path": "a"}, "c1"), text="I read.", thinking="Hm."), "Done.", "Kept.")
    reply = ask(setup, "Go", streamed=streamed, tools=[READ], instructions="Rules.", extra_body={"x_unknown": 1})
    given = [{"role": "user", "content": "Go"}, *(item.model_dump(exclude_none=True) for item in reply.output)]
    given.append({"type": "function_call_output", "call_id": "c1", "output": "file"})
    done = ask(setup, given, streamed=streamed, tools=[READ])
    assert done.output_text == "Done."
    assert not setup.upstream.refused
    assert setup.upstream.sent[0].body["x_unknown"] == 1
    assert setup.upstream.sent[1].body["input"] == given
    with setup.store() as store:
        (info,) = store.sessions()
        assert [m["role"] for m in store.session(info.name).contents.messages()] == ["user", "assistant", "tool", "assistant"]
    more = setup.openai.responses.create(model="m", input="And?", previous_response_id=done.id)
    assert more.output_text == "Kept."
    with setup.store() as store:
        assert len(store.sessions()) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_page_faults(gateway: Any, streamed: bool) -> None:
    setup = gateway(
        calling(("recall", {"address": "p1"}), text="Let me look."),
        calling(("recall", {"address": "p3"}), ("read", {"path": "x"}, "c9")),
        "Both.",
        window=2000,
    )
    given = [*talk(12), {"role": "user", "content": "What was first?"}]
    reply = ask(setup, given, streamed=streamed, tools=[READ])
    assert [item.type for item in reply.output] == ["message", "function_call"]
    assert [tool.name for tool in reply.tools] == ["read"], "a provider repeats the tools that it was offered"
    assert reply.usage.input_tokens == setup.upstream.sent[-1].tokens
    rounds = reply.usage.model_extra["kilburn_rounds"]
    assert [each["input_tokens"] for each in rounds] == [sent.tokens for sent in setup.upstream.sent]
    given += [item.model_dump(exclude_none=True) for item in reply.output]
    given.append({"type": "function_call_output", "call_id": "c9", "output": "file"})
    assert ask(setup, given, streamed=streamed, tools=[READ]).output_text == "Both."
    assert not setup.upstream.refused
    assert [item["type"] for item in setup.upstream.sent[-1].body["input"]].count("function_call_output") == 3
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_a_reply_with_page_faults_is_continued_by_its_id(gateway: Any) -> None:
    setup = gateway(calling(("recall", {"address": "p1"})), "River 0.", "Yes.", window=2000)
    reply = ask(setup, [*talk(12), {"role": "user", "content": "What was first?"}], streamed=False, tools=[READ])
    assert reply.output_text == "River 0."
    assert setup.openai.responses.create(model="m", input="Sure?", previous_response_id=reply.id).output_text == "Yes."
    assert not setup.upstream.refused


def test_openais_own_stream_takes_a_reply_with_page_faults(gateway: Any) -> None:
    setup = gateway(calling(("recall", {"address": "p1"})), "River 0.", window=2000)
    asked = [*talk(12), {"role": "user", "content": "What was first?"}]
    with setup.openai.responses.stream(model="m", input=asked, tools=[READ]) as stream:
        assert stream.get_final_response().output_text == "River 0."
    assert len(setup.upstream.sent) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_a_local_model_answers(gateway: Any, streamed: bool) -> None:
    setup = gateway(
        model=Scripted([calling(("read", {"path": "a"}, "c1"), text="I read."), "Done."], piece=3), upstream=Upstream()
    )
    reply = ask(setup, "Go", streamed=streamed, tools=[READ], instructions="Rules.")
    assert [item.type for item in reply.output] == ["message", "function_call"]
    given = [{"role": "user", "content": "Go"}, *(item.model_dump(exclude_none=True) for item in reply.output)]
    given.append({"type": "function_call_output", "call_id": "c1", "output": "file"})
    assert ask(setup, given, streamed=streamed, tools=[READ]).output_text == "Done."
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_a_chain_goes_on_through_a_gateway_that_has_the_session_as_it_was(tmp_path: Path) -> None:
    """Two gateways over one file, in turn: what the other one said is read before the prompt is made."""
    with ExitStack() as stack:
        far = stack.enter_context(serving(Upstream(otherwise="Done.")))
        settings = Settings(db=str(tmp_path / "a.db"), upstream=f"{far}/v1", tokenizer="chars/4", embedder=None)
        urls = [stack.enter_context(serving(build(settings))) for _ in range(2)]
        before: dict[str, str] = {}
        for number in range(6):
            body = {"model": "m", "input": f"Question {number}", **before}
            answer = httpx2.post(f"{urls[number % 2]}/v1/responses", json=body, timeout=600)
            assert answer.status_code == 200, answer.text
            before = {"previous_response_id": answer.json()["id"]}
    with kilburn.open(str(tmp_path / "a.db"), readonly=True, embedder=None) as store:
        (info,) = store.sessions()
        said = [part.text for message in store.session(info.name).contents.originals() for part in message.parts]
    assert said == [text for number in range(6) for text in (f"Question {number}", "Done.")]
