"""The embedded model, for real: SmolLM2-135M by llama.cpp in this process."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import KilburnError, Overlong, Refused, SpecError, Unavailable
from kilburn.model import Delta, Reply, Request, ToolSpec, complete
from kilburn.models.chat import Chat
from kilburn.models.local import Local, Vocabulary
from kilburn.models.retry import Retry
from kilburn.testing.models import check_model
from waiting import until

pytestmark = pytest.mark.model

TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]
STORY = Request(messages=[{"role": "user", "content": "Tell a very long story."}], max_tokens=1500, temperature=0.0)


def long_text(items: int) -> str:
    return " ".join(f"Item {item} costs {item * item} coins." for item in range(items))


def hi(**more: object) -> Request:
    return Request(**{"messages": TALK, "max_tokens": 4, "temperature": 0.0, **more})  # type: ignore[arg-type]


def test_contract(weights: Path, local: Local) -> None:
    check_model(lambda: Local(weights, context=2048, threads=1))


def test_name_of_the_catalogue_and_all_cores_are_the_default(weights: Path) -> None:
    with Local() as model:
        assert (model.name, model.form, model.context) == ("smollm2", "chat", 8192)
        assert complete(model, hi()).usage is not None


def test_what_is_loaded_is_shared_and_freed(weights: Path) -> None:
    first, second = Local(weights, context=512, threads=1), Local(weights, context=512, threads=1)
    assert first.context == 512
    first.close()
    first.close()
    assert complete(second, hi()).usage is not None
    with pytest.raises(Unavailable, match="was closed"):
        complete(first, hi())
    with pytest.raises(Unavailable, match="was closed"):
        first.tokenizer.count("gone")
    second.close()


def test_reply_streams_within_its_cap(local: Local) -> None:
    pieces = list(local.stream(hi(max_tokens=6)))
    reply = pieces[-1]
    assert isinstance(reply, Reply)
    assert "".join(piece.text for piece in pieces[:-1] if isinstance(piece, Delta)) == reply.text
    assert reply.usage is not None
    assert (reply.usage.reply <= 6, len(pieces) > 2) == (True, True)


def test_greedy_replies_repeat(local: Local) -> None:
    request = hi(max_tokens=12)
    assert complete(local, request).text == complete(local, request).text


def test_schema_is_kept(local: Local) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    talk = [{"role": "user", "content": "Describe a cat named Tom, aged 3."}]
    reply = complete(local, Request(messages=talk, max_tokens=60, temperature=0.0, schema=schema))
    cat = json.loads(reply.text)
    assert set(cat) == {"name", "age"}
    assert 0 <= cat["age"] <= 30
    assert reply.finish == "stop"


def test_schema_that_cannot_be_held_is_refused(local: Local) -> None:
    with pytest.raises(Refused):
        complete(local, hi(schema={"type": "nonsense"}))


def test_tokens_of_a_prompt_are_exact(local: Local) -> None:
    for end in range(1, len(TALK) + 1):
        usage = complete(local, hi(messages=TALK[:end], max_tokens=1)).usage
        assert usage is not None
        assert local.prompt_tokens(TALK[:end]) == usage.prompt


def test_envelopes_and_texts_bound_the_prompt(local: Local) -> None:
    counter = local.tokenizer
    assert isinstance(counter, Vocabulary)
    code = "\n\tdef f(x):\n\n    return x\n"
    talk = [*TALK, {"role": "assistant", "content": long_text(30)}, {"role": "user", "content": code}]
    told = counter.overhead + sum(counter.envelope + counter.count(message["content"]) for message in talk)
    exact = local.prompt_tokens(talk)
    # At most: the default system prompt that this talk does not need, and one token a message.
    assert exact <= told <= exact + counter.overhead + len(talk)


@settings(max_examples=30)
@given(text=st.text(max_size=200))
def test_counting_never_says_less_than_the_prompt_has(local: Local, text: str) -> None:
    counter = local.tokenizer
    said = [{"role": "user", "content": text}]
    assert counter.count(text) >= 0
    assert local.prompt_tokens(said) <= counter.overhead + counter.envelope + counter.count(text)


def test_count_of_nothing_is_nothing(local: Local) -> None:
    assert local.tokenizer.count("") == 0
    assert local.tokenizer.count("hello world") == 2


def test_prompt_that_does_not_fit_is_overlong(local: Local) -> None:
    with pytest.raises(Overlong, match="2048"):
        complete(local, hi(messages=[{"role": "user", "content": long_text(400)}]))
    assert complete(local, hi()).usage is not None


def test_reply_that_fills_the_window_is_cut(weights: Path) -> None:
    story = [{"role": "user", "content": long_text(14) + " Now tell a very long story."}]
    with Local(weights, context=256, threads=1) as model:
        reply = complete(model, Request(messages=story, max_tokens=5000, temperature=0.0))
    assert reply.finish == "length"
    assert reply.usage is not None
    assert reply.usage.prompt + reply.usage.reply <= 256


def test_time_is_kept_while_reading_and_while_writing(local: Local) -> None:
    """In less time than any processor needs; and the model is free for the next request at once."""
    for request in (
        hi(messages=[{"role": "user", "content": long_text(150)}], timeout=0.02),
        Request(messages=STORY.messages, max_tokens=1500, temperature=0.0, timeout=0.2),
    ):
        said = []
        with pytest.raises(Unavailable, match="in time"):
            said.extend(local.stream(request))
        assert len(said) < 1000
        complete(local, hi(timeout=600))


def test_closing_a_stream_stops_the_model(local: Local) -> None:
    def slot() -> Any:
        """What llama.cpp says of the one sequence that it decodes."""
        return local._loaded().ask("GET", "/slots")[0]

    stream = local.stream(STORY)
    for _ in range(20):
        assert isinstance(next(stream), Delta)
    stream.close()  # type: ignore[attr-defined]
    until(lambda: not slot()["is_processing"])
    # The prompt has some fifty tokens. The rest of the story would have had some fourteen hundred.
    assert 20 <= slot()["n_prompt_tokens"] < 500
    complete(local, hi())


def test_tools_are_refused_where_the_template_drops_them(local: Local) -> None:
    assert not local.takes_tools
    with pytest.raises(Refused, match="no place for tools"):
        complete(local, hi(tools=(ToolSpec(name="f", description="d", parameters={}),)))


def test_a_tool_result_of_another_model_can_be_read(local: Local) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk = [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rome"},
    ]
    assert complete(local, hi(messages=talk)).usage is not None


def test_port_answers_only_with_the_key(local: Local) -> None:
    engine = local._engine
    assert engine is not None
    stranger = Chat("x", f"{engine._server.listening_address}/v1", "guess", retry=Retry(attempts=1))
    with stranger, pytest.raises(Refused, match="401"):
        complete(stranger, hi())


def test_chat_speaks_to_a_real_server(local: Local) -> None:
    engine = local._engine
    assert engine is not None
    server = f"{engine._server.listening_address}/v1"
    check_model(lambda: Chat("smollm2", server, engine._key, retry=Retry(attempts=1)))
    with Chat("smollm2", server, engine._key, retry=Retry(attempts=1)) as model:
        assert complete(model, hi()).text == complete(local, hi()).text
        with pytest.raises(Overlong):
            complete(model, hi(messages=[{"role": "user", "content": long_text(400)}]))


@pytest.mark.parametrize("content", [b"GGUF" + bytes(64), b"GGUF", b"no model", b""])
def test_file_that_is_no_model_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises((Unavailable, SpecError)):
        Local(path)


def test_no_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KilburnError) as caught:
        Local(tmp_path / "missing.gguf")
    assert caught.value.advice


def test_nothing_is_printed(weights: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Local(weights, context=300, threads=1) as model:
        complete(model, hi())
    gc.collect()
    assert capfd.readouterr() == ("", "")
