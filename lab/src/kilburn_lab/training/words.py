"""A tokenizer of a small world, where each word is one token, and its chat template.

What the kernel renders is what the transformer reads. Each message begins with a token for its role. What the kernel writes in
brackets about addresses (a handle, the head and the end of a fold) is one token. A tool call stands behind the reply's text as
the tool's name and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage, SpecError
from kilburn.message import Kind, Message, Part, Role

CONTROL = ("<pad>", "<unknown>", "<gap>", "<user>", "<agent>", "<tool>", "<end>")
PAD, UNKNOWN, GAP, USER, AGENT, TOOL, END = range(len(CONTROL))
ROLES = {"system": USER, "user": USER, "assistant": AGENT, "tool": TOOL}


class WordTokenizer:
    """The words of a world, and its tools. Also the counter of a session, as `kilburn.open(tokenizer=...)` takes it.

    Args:
        name: of the world.
        words: all of them, each once. A word may hold blanks and signs; where two fit, the longer one is read.
        tools: the names of each tool's arguments, in the order in which the transformer writes their values.
        brief: whether words of another world that stand together are one `<unknown>`: for a world whose prompts have
            instructions in English, which such small weights cannot read.

    Raises:
        SpecError: an empty word.
    """

    envelope = 1

    def __init__(
        self, name: str, words: Iterable[str], tools: Mapping[str, Sequence[str]] | None = None, *, brief: bool = False
    ) -> None:
        self.name = f"words:{name}"
        self.world, self.brief = name, brief
        self.tools = {tool: tuple(given) for tool, given in (tools or {}).items()}
        self.words = tuple(dict.fromkeys((*CONTROL, *words, *self.tools)))
        if "" in self.words:
            raise SpecError(f"the world {name!r} has an empty word", advice="leave it out")
        self.ids = {word: number for number, word in enumerate(self.words)}
        known = sorted(self.words[len(CONTROL) :], key=lambda word: (-len(word), word))
        spelled = (re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else "") for word in known)
        self._read = re.compile(
            rf"(?P<gap>\[(?:p\d|end [0-9a-f])[^\]\n]*\])|(?P<word>{'|'.join(spelled)})|(?P<other>\w+|[^\w\s])"
        )

    def __len__(self) -> int:
        return len(self.words)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; a word of another world is `<unknown>`."""
        found: list[int] = []
        for match in self._read.finditer(text):
            kind = match.lastgroup
            token = GAP if kind == "gap" else self.ids[match[0]] if kind == "word" else UNKNOWN
            if not (self.brief and token == UNKNOWN and found[-1:] == [UNKNOWN]):
                found.append(token)
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The words of some tokens, with blanks between them, but none within quotation marks or at the edge of a line."""
        said = ""
        for word in (self.words[token] for token in tokens if token != END):
            glued = not said or said.endswith(('"', "\n")) or word.startswith(('"', "\n"))
            said += word if glued else f" {word}"
        return said

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """The tokens of a prompt in the chat form, up to where the reply begins."""
        found: list[int] = []
        for message in messages:
            role = ROLES.get(str(message.get("role")), USER)
            found += [role, *self.encode(_text(message))]
            for call in message.get("tool_calls") or ():
                found += self.encode(self._called(call["function"]))
            if role == AGENT:
                found.append(END)
        return [*found, AGENT]

    def reply(self, text: str) -> list[int]:
        """The tokens of a reply."""
        return [*self.encode(text), END]

    def split(self, text: str) -> tuple[str, str, str]:
        """A reply as its text, the tool that it calls, and the arguments in JSON; the tool is "" where it calls none.

        Words behind the tool's name are its arguments; one too few or too many makes no call.
        """
        words = text.split(" ")
        at = next((number for number, word in enumerate(words) if word in self.tools), None)
        if at is None:
            return text, "", ""
        names, values = self.tools[words[at]], words[at + 1 :]
        if len(names) != len(values):
            return text, "", ""
        return " ".join(words[:at]), words[at], msgspec.json.encode(dict(zip(names, values, strict=True))).decode()

    def message(self, text: str, call: str) -> Message:
        """A reply as the product's message: its text, and the tool that it calls, under this name of the call."""
        text, tool, given = self.split(text)
        parts = [Part(kind=Kind.TEXT, text=text)] if text or not tool else []
        if tool:
            parts.append(Part(kind=Kind.CALL, text=given, name=tool, call=call))
        return Message(role=Role.ASSISTANT, parts=tuple(parts))

    def said(self, message: Mapping[str, Any]) -> str:
        """A message of the chat form as text alone, with its calls behind it in the form that `split` reads."""
        calls = (self._called(call["function"]) for call in message.get("tool_calls") or ())
        return " ".join(filter(None, (_text(message), *calls)))

    def _called(self, function: Mapping[str, Any]) -> str:
        name, given = str(function.get("name")), function.get("arguments") or "{}"
        try:
            values = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidMessage(f"a call of {name} without arguments in JSON", advice="give a JSON object") from error
        return " ".join((name, *(str(values[key]) for key in self.tools.get(name, ()) if key in values)))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "\n".join(str(block["text"]) for block in blocks if isinstance(block, dict) and "text" in block)
