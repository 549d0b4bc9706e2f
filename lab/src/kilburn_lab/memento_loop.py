"""Reasoning in blocks: each ends with a memento, then the block leaves the window and the model goes on.

The loop reads the tags from the stream, and closes a block that exceeds its cap. It appends the text to a session
whose policy is `memento`, which does the folding. In `Mode.RESTART` the generation stops after every memento and
begins again from the rendered prompt; without access to the model's cache nothing else is possible. From Memento
(Microsoft, microsoft/memento). The loop runs no tools.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum

import msgspec

from kilburn.agents.loop import Limits, Said, set_up
from kilburn.answering import answerer
from kilburn.effect import Ask
from kilburn.kernel.render import Prompt, to_send
from kilburn.kernel.session import Session
from kilburn.message import Kind, Role
from kilburn.model import Delta, Finish, Model, Reply, Request, stream_pieces
from kilburn.policies.memento import SYSTEM
from kilburn.selection.extract import Piece, extract
from kilburn.selection.judgement import Verdict, judge
from kilburn.selection.lines import whole_sentences
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START, Parser, ThoughtBlock, Where, parse
from kilburn.wire.quotation import quote
from kilburn_lab.cap import Cap, clip

__all__ = ["INSTRUCTIONS", "MementoLoop", "Mode"]

TAG = re.compile("(" + "|".join(map(re.escape, (BLOCK_START, BLOCK_END, SUMMARY_START, SUMMARY_END))) + ")")

INSTRUCTIONS = (
    "Think in blocks. Write each block of reasoning between <|block_start|> and <|block_end|>. Behind every block write a "
    "memento between <|summary_start|> and <|summary_end|>: the block's results first, then each formula, value and open "
    "question that you will need. You will not see the block again, only its memento. When you are done, write the answer "
    "outside of any block."
)


class Mode(StrEnum):
    """What happens when a memento is complete."""

    RESTART = "restart"
    """The reply is stopped; the next one begins from the rendered prompt, without the block."""
    STREAM = "stream"
    """The reply runs on; its blocks leave the window when it is complete. Use it with an engine that evicts a block from
    its own cache while it goes on: `Closed.block` says which characters of the reply to evict."""


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is told besides the task.

    Args:
        instructions: appended as a system message if the session is new; "" for a model that was trained.
        nudge: added to the prompt after a restart, but not appended to the session; "" for nothing.
    """

    instructions: str = INSTRUCTIONS
    nudge: str = "Continue."


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A block that ended, and its memento.

    Args:
        block: its spans in the text of the reply.
        tokens: of its content; `memento_tokens` of its memento.
        forced: whether the cap closed it, and not the model.
        address: the page that holds it whole; "" while the reply still runs.
    """

    block: ThoughtBlock
    memento: str
    tokens: int
    memento_tokens: int
    forced: bool = False
    address: str = ""


class Reasoned(msgspec.Struct, kw_only=True):
    """How a run ended.

    Args:
        finish: "stop", "length", "calls" (it wanted a tool), "empty", "refused", or the limit that was
            reached: "steps", "tokens" or "seconds".
        text: the last reply's words outside of blocks.
        blocks: all closed blocks, in order.
        malformed: replies whose tags were out of place; they stay whole.
        steps: number of replies; `tokens`: of all prompts and replies together.
        shown: for each block, the tokens of prompt and reply when it ended, and of the window without it: the
            sawtooth.
        peak: the largest number of tokens of a prompt with its reply.
    """

    finish: str = "stop"
    text: str = ""
    blocks: list[Closed] = []
    malformed: int = 0
    steps: int = 0
    tokens: int = 0
    shown: list[tuple[int, int]] = []
    peak: int = 0


class Finished(msgspec.Struct, frozen=True):
    """The last event of every run."""

    outcome: Reasoned


ReasoningEvent = Said | Closed | Finished


class _Draft(msgspec.Struct, kw_only=True):
    """One reply while it is streamed: its text, and where the loop closed something itself."""

    parser: Parser
    text: str = ""
    finish: str = ""
    forced: bool = False
    held: int = 0


class MementoLoop:
    """Lets a model reason far beyond its window.

    Args:
        model: does the reasoning; its reply is read as it streams.
        session: keeps every block; open its store with the policy "memento".
        mode: what happens after a memento.
        max_block_tokens: a longer block is closed, and its memento is asked for. 7,000 is the paper's cap; without
            one, its training led to ever longer blocks.
        max_memento_tokens: a longer memento is closed.
        limits: what one run may spend; `limits.reply` caps each reply.
        wording: what the model is told.
    """

    def __init__(
        self,
        model: Model,
        session: Session,
        *,
        mode: Mode = Mode.RESTART,
        max_block_tokens: int = 7000,
        max_memento_tokens: int = 512,
        limits: Limits | None = None,
        wording: Wording | None = None,
    ) -> None:
        if max_block_tokens < 1 or max_memento_tokens < 1:
            raise ValueError("a block and a memento hold 1 token at least")
        self.model, self.session, self.mode = model, session, Mode(mode)
        self.max_block_tokens, self.max_memento_tokens = max_block_tokens, max_memento_tokens
        self.limits = limits or Limits(reply=2 * (max_block_tokens + max_memento_tokens))
        wording = wording or Wording()
        self.nudge = wording.nudge
        self._answer = answerer(model)
        self._count: Callable[[str], int] = session.counter.count
        nudge = self._count(self.nudge) + session.counter.envelope if self.nudge else 0
        set_up(session, wording.instructions, nudge)

    def run(self, text: str | None = None) -> Reasoned:
        """Reason until the model ends a reply outside of a block, or a limit is reached.

        Args:
            text: the user's message; None to go on where the session stands.

        Raises:
            ModelError: the model failed. All earlier blocks are in the session; nothing of the failed reply is.
        """
        for event in self.stream(text):
            if isinstance(event, Finished):
                return event.outcome
        raise AssertionError("a run ended without its last event")

    def stream(self, text: str | None = None) -> Iterator[ReasoningEvent]:
        """The run's events as they happen; the last one is `Finished`. Closing it early stops the model."""
        if text is not None:
            self.session.append({"role": "user", "content": text})
        outcome = Reasoned()
        began = time.monotonic()
        while not (spent := self.limits.reached(steps=outcome.steps, tokens=outcome.tokens, seconds=time.monotonic() - began)):
            draft = _Draft(parser=Parser())
            yield from self._speak(draft, outcome)
            self._mend(draft)
            yield from self._admit(draft, outcome)
            if draft.finish:
                outcome.finish = draft.finish
                break
        else:
            outcome.finish = spent
        yield Finished(outcome)

    def _speak(self, draft: _Draft, outcome: Reasoned) -> Iterator[Said]:
        """One reply, until it ends or the loop stops it. `draft.finish` stays "" if the reply is to be continued."""
        prompt = to_send(self.session.render(self.model.form))
        whole = Cap(self.limits.reply, self._count)
        inner = self._cap(Where.BLOCK)
        with closing(stream_pieces(self.model, self._request(prompt, bool(outcome.blocks)))) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                if isinstance(piece, Reply):
                    draft.finish = piece.finish
                    break
                yield Said(piece.text, piece.reasoning)
                inner = self._read(draft, piece, inner)
                if draft.forced or self._breaks(draft):
                    break
                if whole.add(piece.text):
                    draft.text, draft.finish = whole.kept, Finish.LENGTH
                    break
        outcome.steps += 1
        draft.held = prompt.tokens + self._count(draft.text)
        outcome.tokens += draft.held
        outcome.peak = max(outcome.peak, draft.held)

    def _request(self, prompt: Prompt, again: bool) -> Request:
        messages = [*prompt, {"role": "user", "content": self.nudge}] if again and self.nudge else prompt
        return Request(messages=messages, system=prompt.system, max_tokens=self.limits.reply, timeout=self.limits.seconds)

    def _read(self, draft: _Draft, piece: Delta, inner: Cap) -> Cap:
        """Read a piece, one tag at a time; stop after a memento, and if a cap is exceeded."""
        for part in filter(None, TAG.split(piece.text)):
            draft.text += part
            if draft.parser.feed(part):
                inner = self._cap(draft.parser.where)
                part = draft.text[draft.parser.opened :]
            over = draft.parser.where in (Where.BLOCK, Where.MEMENTO) and inner.add(part)
            if over and not draft.parser.faults:
                draft.forced = True
            if draft.forced or self._breaks(draft):
                break
        return inner

    def _cap(self, where: Where) -> Cap:
        most = self.max_memento_tokens if where is Where.MEMENTO else self.max_block_tokens
        return Cap(most + 1, self._count)

    def _breaks(self, draft: _Draft) -> bool:
        parser = draft.parser
        return self.mode is Mode.RESTART and bool(parser.blocks) and parser.where is Where.OUTSIDE and not parser.faults

    def _mend(self, draft: _Draft) -> None:
        """Close the tags of a reply that the loop stopped, so that it is well-formed; a malformed reply stays as it is."""
        parser = draft.parser
        if parser.faults:
            return
        if not draft.finish and self._breaks(draft):
            draft.text = draft.text[: parser.blocks[-1].end]
            return
        if not draft.forced and draft.finish != Finish.LENGTH:
            return
        head, inside = draft.text[: parser.opened], draft.text[parser.opened : min(parser.read, len(draft.text))]
        if parser.where is Where.BLOCK and inside.strip():
            content = whole_sentences(clip(inside, self.max_block_tokens, self._count), min_share=0.5)
            draft.text = f"{head}{content}{BLOCK_END}{SUMMARY_START}{self._memento(content)}{SUMMARY_END}"
        elif parser.where is Where.BETWEEN:
            start = head.rindex(BLOCK_START) + len(BLOCK_START)
            draft.text = f"{head}{SUMMARY_START}{self._memento(head[start : -len(BLOCK_END)])}{SUMMARY_END}"
        elif parser.where is Where.MEMENTO and inside.strip():
            draft.text = (
                f"{head}{whole_sentences(clip(inside, self.max_memento_tokens, self._count), min_share=0.5)}{SUMMARY_END}"
            )
        else:
            return
        draft.forced, draft.finish = True, ""

    def _memento(self, content: str) -> str:
        """A memento of a block that the loop closed: the model's, or lines of the block if the model's text is of no
        use."""
        most = self.max_memento_tokens
        piece = Piece(0, str(Role.ASSISTANT), str(Kind.REASONING), content)
        prompt = f"{quote('block', content)}\nWrite the memento of this block in at most {max(10, most // 2)} words."
        timeout = min(120.0, self.limits.seconds or 120.0)
        answer = self._answer(Ask(prompt=prompt, system=SYSTEM, max_tokens=most, purpose="memento", timeout=timeout))
        said = TAG.sub("", clip(answer.text, most, self._count)).strip() if answer.has_text else ""
        if said and judge(said, [piece], prompt=prompt).verdict in (Verdict.DONE, Verdict.DROPS):
            return said
        spans = extract([piece], most, self._count).spans
        lines = "".join(content[start:end] for _, kept in spans for start, end in kept)
        return TAG.sub("", lines).strip() or clip(content.strip(), most, self._count).strip() or "(nothing)"

    def _admit(self, draft: _Draft, outcome: Reasoned) -> Iterator[Closed]:
        if not draft.text.strip():
            draft.finish = "empty" if draft.finish in ("", Finish.STOP) else draft.finish
            return
        address = self.session.append({"role": "assistant", "content": draft.text})
        found = parse(draft.text)
        outcome.malformed += bool(found.faults)
        outcome.text = draft.text if found.faults else _outside(draft.text, found.blocks)
        if found.faults:
            return
        for block in found.blocks:
            memento = draft.text[slice(*block.memento)]
            closed = Closed(
                block=block,
                memento=memento,
                tokens=self._count(draft.text[slice(*block.content)]),
                memento_tokens=self._count(memento),
                forced=draft.forced and block is found.blocks[-1],
                address=address,
            )
            outcome.blocks.append(closed)
            yield closed
        if found.blocks:
            outcome.shown.append((draft.held, self.session.prompts.use))


def _outside(text: str, blocks: tuple[ThoughtBlock, ...]) -> str:
    """The words outside of blocks."""
    edges = [0, *(edge for block in blocks for edge in (block.start, block.end)), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)).strip()
