"""The embedded model: a GGUF file, run in this process by llama.cpp.

Its tokenizer is the model's own, so counts are exact. If the model's chat template has no place for tools, a request
with tools is an error; they are not dropped silently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kilburn.errors import Refused, ToolsRefused, Unavailable
from kilburn.model import Delta, Reply, Request, ToolSpec
from kilburn.models.llama_server import LlamaServer, load
from kilburn.models.weights import catalogue, find
from kilburn.wire import chat
from kilburn.wire.chat_stream import Assembly

__all__ = ["Local"]

_CONTEXT = 8192
"""The default window: its cache takes 190 MB for SmolLM2-135M and 235 MB for Qwen2.5-1.5B."""


class Vocabulary:
    """Counts tokens as the loaded model does.

    Attributes:
        name: "local:" and the model's name.
        envelope: what one message costs besides its text in the model's chat template.
        overhead: what a prompt costs before its first message and after its last one: the default
            system prompt that some templates add, and the opening of the reply.
        exact: True: the window need not be corrected by the usage in replies.
    """

    exact = True

    def __init__(self, name: str, loaded: LlamaServer) -> None:
        self.name = f"local:{name}"
        self._engine: LlamaServer | None = loaded
        single, three = self._measure(loaded, 1), self._measure(loaded, 3)
        self.envelope = -(-(three - single) // 2)
        self.overhead = max(single - self.envelope, 0)

    def count(self, text: str) -> int:
        """Return the tokens of `text` alone.

        Raises:
            Unavailable: the model was closed.
        """
        if not text:
            return 0
        if self._engine is None:
            raise Unavailable(f"{self.name} was closed", advice="make a new one")
        # Text that looks like a special token counts as one, because it does in a prompt.
        body = {"content": text, "add_special": False, "parse_special": True}
        return len(self._engine.ask("POST", "/tokenize", body)["tokens"])

    def close(self) -> None:
        """Release the model; counting then raises."""
        self._engine = None

    def _measure(self, loaded: LlamaServer, turns: int) -> int:
        """Return the tokens of a prompt of so many turns, without their texts. Templates require that users and assistants
        alternate."""
        messages = [{"role": ("user", "assistant")[turn % 2], "content": "a"} for turn in range(turns)]
        return prompt_tokens(loaded, messages, ()) - turns * self.count("a")


class Local:
    """A model on this machine.

    Args:
        model: the path of a GGUF file, or a name that `kilburn models pull` knows.
        context: window in tokens, 8,192 or what the model was trained for if that is less.
        threads: for llama.cpp; None takes one a core.
        timeout: seconds for a reply, at most; None for what its request says.

    Two objects for one file, window and number of threads share what is loaded.

    Raises:
        MissingExtra: the extra `local` is not installed.
        Unavailable: no such model here.
    """

    form = "chat"

    def __init__(
        self,
        model: str | Path = "smollm2",
        context: int | None = None,
        threads: int | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        path = find(str(model))
        self.name = path.stem if path == Path(model) else str(model)
        loaded = load(path, context or _CONTEXT, threads or os.cpu_count() or 1)
        self._engine: LlamaServer | None = loaded
        self._timeout = timeout
        self.context: int | None = loaded.context
        self.tokenizer: Any = Vocabulary(self.name, loaded)
        self.takes_tools = "tools" in loaded.template
        self.parameters = loaded.parameters
        self._temperature = next((weights.temperature for weights in catalogue() if weights.file == path.name), None)

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the reply, streamed while it is decoded. One reply is decoded at a time; others wait.

        Raises:
            Refused: no messages, or a schema that is not supported. ToolsRefused: the template has no place for tools.
            Overlong: the prompt does not fit the window.
            Unavailable: the time was up, or the model was closed.
        """
        loaded = self._check(request)
        body = {
            **({} if self._temperature is None else {"temperature": self._temperature}),
            **chat.optional_fields(request),
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **request.options,
        }
        assembly = Assembly(self.name)
        timeout = min((seconds for seconds in (self._timeout, request.timeout) if seconds is not None), default=None)
        with closing(loaded.stream(body, timeout)) as chunks:
            for chunk in chunks:
                yield from assembly.feed(chunk)
        yield assembly.reply()

    def prompt_tokens(self, messages: Sequence[dict[str, Any]], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Return the tokens that the prompt of these messages has, exactly: template applied, reply opened."""
        return prompt_tokens(self._loaded(), messages, tools)

    def close(self) -> None:
        """Release the loaded model; it is freed when no other object shares it. May be called twice."""
        self._engine = None
        self.tokenizer.close()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _loaded(self) -> LlamaServer:
        if self._engine is None:
            raise Unavailable(f"{self.name} was closed", advice="make a new one")
        return self._engine

    def _check(self, request: Request) -> LlamaServer:
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        if request.tools and not self.takes_tools:
            problem = f"the chat template of {self.name} has no place for tools"
            raise ToolsRefused(problem, advice="use a model trained for tools")
        return self._loaded()


def prompt_tokens(loaded: LlamaServer, messages: Sequence[dict[str, Any]], tools: tuple[ToolSpec, ...]) -> int:
    """Return the tokens of a whole prompt, as llama.cpp will read it."""
    body: dict[str, Any] = {"messages": list(messages)}
    if tools:
        body["tools"] = chat.tools(tools)
    tokens: int = loaded.ask("POST", "/v1/chat/completions/input_tokens", body)["input_tokens"]
    return tokens
