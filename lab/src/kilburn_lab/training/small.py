"""A small language model that a recipe tuned, as a model of the product, like `kilburn_lab.training.model.Toy`.

kilburn.open(..., model="kilburn_lab.training.small:Small('trained/mem1-model/grpo-0')")

A template without a place for tools is no obstacle: a call stands behind the reply's text as words, and what a tool returned is
said to the model as a user's message. Training renders its examples by the same function. Replies that several threads await at
the same time are written together, which is what makes many episodes quick on a GPU.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import MissingExtra, Overlong, Refused, SpecError
from kilburn.model import Delta, Finish, Reply, Request, Tokens
from kilburn_lab.training.words import WordTokenizer

try:
    import torch

    from kilburn_kv.weights import Weights, load
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "trl") from error

__all__ = ["Small"]

ABOUT = "kilburn.json"
"""The file in an exported folder that says what the folder is."""


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an export is.

    Args:
        tools: the arguments of each tool, in the order in which the model writes them.
        reply: tokens of a reply, at most.
        setting: of the training: a digest.
    """

    recipe: str
    arm: str
    seed: int
    reply: int
    tools: dict[str, tuple[str, ...]]
    setting: str


class ChatTokenizer:
    """A language model's tokenizer and chat template; also the counter of a session.

    Raises:
        SpecError: there is no chat template.
    """

    def __init__(self, tokenizer: Any, name: str, tools: Mapping[str, tuple[str, ...]]) -> None:
        self.name, self._tokenizer = f"chat:{name}", tokenizer
        self.words = WordTokenizer(name, (), tools)
        if not getattr(tokenizer, "chat_template", None):
            raise SpecError(f"{name} has no chat template", advice="give a model that was trained to chat")
        one = {"role": "user", "content": "a"}
        self.envelope = len(self.prompt([one, one])) - len(self.prompt([one])) - self.count("a")

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def plain(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Messages of the chat form as every template takes them: a role and a text."""
        roles = {"tool": "user"}
        return [{"role": roles.get(str(each["role"]), str(each["role"])), "content": self.words.said(each)} for each in messages]

    def prompt(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """The tokens of a prompt, up to where the reply begins."""
        found = self._tokenizer.apply_chat_template(self.plain(messages), add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])


class _Awaited(msgspec.Struct, eq=False):
    """A reply that a thread waits for."""

    prompt: list[int]
    most: int
    warm: float
    seed: int
    tokens: list[int] = []
    done: bool = False


class Small:
    """A tuned model out of the folder that a recipe exported, on a GPU where there is one.

    Args:
        path: the folder.
        temperature: where a request names none; 0 for the likeliest token.
        seed: of what is drawn, where a request names none; the number of the reply is added to it.

    Raises:
        SpecError: no such folder, or not of a recipe. Unavailable: its weights cannot be read.
    """

    form = "chat"

    def __init__(self, path: str, temperature: float = 0.0, seed: int = 0) -> None:
        self.described = about(Path(path))
        self._weights: Weights = load(path, device="cuda" if torch.cuda.is_available() else "cpu")
        self.name = f"small:{self.described.recipe}-{self.described.arm}-{self.described.seed}"
        self.tokenizer = ChatTokenizer(self._weights.words, self.name, self.described.tools)
        self.context: int | None = getattr(self._weights.model.config, "max_position_embeddings", None)
        self._alone = threading.Lock()
        self._awaited: list[_Awaited] = []
        self._temperature, self._seed, self._replies = temperature, seed, itertools.count()

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The reply; a tool's name at its end, with as many words behind it as the tool has arguments, is a call.

        Raises:
            Refused: a request without messages. Overlong: the prompt and the reply do not fit into the context.
        """
        if not request.messages:
            raise Refused("a request without messages", advice="send at least one message")
        prompt = self.tokenizer.prompt(request.messages)
        most = min(request.max_tokens, self.described.reply)
        if self.context is not None and len(prompt) + most > self.context:
            raise Overlong(f"{len(prompt)} tokens and {most} to write", advice=f"a window of {self.context - most} fits")
        warm = self._temperature if request.temperature is None else request.temperature
        number = next(self._replies)
        tokens = self._written(_Awaited(prompt, most, warm, self._seed + number if request.seed is None else request.seed))
        done = tokens[-1:] and tokens[-1] in self._weights.stops
        text = self._weights.text(tokens[:-1] if done else tokens).strip()
        call = hashlib.sha256(f"{self.name}/{self._seed}/{number}/{prompt}".encode()).hexdigest()[:12]
        reply = Reply(
            message=self.tokenizer.words.message(text, f"call_{call}"),
            finish=Finish.STOP if done else Finish.LENGTH,
            usage=Tokens(prompt=len(prompt), reply=len(tokens)),
        )
        if reply.text:
            yield Delta(reply.text)
        yield msgspec.structs.replace(reply, finish=Finish.CALLS) if reply.calls else reply

    def _written(self, mine: _Awaited) -> list[int]:
        """The tokens of a reply. Whoever gets the lock also writes those that others wait for, if nothing is drawn for them."""
        self._awaited.append(mine)
        try:
            with self._alone:
                if not mine.done:
                    together = [mine] if mine.warm else [each for each in self._awaited if not (each.warm or each.done)]
                    for each, tokens in zip(together, self._generated(together), strict=True):
                        each.tokens, each.done = tokens, True
        finally:
            self._awaited.remove(mine)
        return mine.tokens

    def _generated(self, replies: Sequence[_Awaited]) -> list[list[int]]:
        model, device, warm = self._weights.model, self._weights.device, replies[0].warm
        drawn = {"do_sample": True, "temperature": warm, "top_k": 0} if warm > 0 else {"do_sample": False}
        stops = sorted(self._weights.stops)
        pad, longest = stops[0] if stops else 0, max(len(each.prompt) for each in replies)
        rows = [[pad] * (longest - len(each.prompt)) + each.prompt for each in replies]
        told = [[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in replies]
        with torch.inference_mode(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(replies[0].seed)
            found = model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(told, device=device),
                max_new_tokens=max(each.most for each in replies),
                eos_token_id=stops or None,
                pad_token_id=pad,
                **drawn,
            )
        return [self._up_to_stop(row[: each.most]) for each, row in zip(replies, found[:, longest:].tolist(), strict=True)]

    def _up_to_stop(self, tokens: list[int]) -> list[int]:
        end = next((number for number, token in enumerate(tokens, 1) if token in self._weights.stops), len(tokens))
        return tokens[:end]


def about(folder: Path) -> ExportedModel:
    """What an exported folder is.

    Raises:
        SpecError: it is none.
    """
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=ExportedModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise SpecError(f"no tuned model at {folder}: {error}", advice="give a folder that a recipe exported") from error
