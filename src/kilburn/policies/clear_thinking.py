"""Old thinking leaves: Anthropic's `clear_thinking_20251015`, done here.

It has no trigger: thinking of all but the last assistant turns leaves as soon as a new turn has some. In a chain it
must be first, as the provider requires. What leaves stays in the store, under its address.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kilburn.effect import Answer, Effect, Note
from kilburn.message import Kind, Role
from kilburn.move import Evict, Move
from kilburn.page import Page
from kilburn.policy import View
from kilburn.wire.editing import Amount, ClearThinkingEdit, plain_amount


@dataclass(frozen=True)
class ClearThinking:
    """Keep the thinking of the last assistant turns only.

    A turn is everything that the assistant says and does between two messages of the user, including tool calls. So
    thinking within one long sequence of tool calls stays until the user speaks again.

    Args:
        keep: how many of the last turns with thinking keep it, or "all". The provider's objects (`{"type":
            "thinking_turns", "value": 2}`) are accepted too.
    """

    keep: int | str | Mapping[str, object] = 1

    def __post_init__(self) -> None:
        keep: object = self.keep
        if isinstance(self.keep, Mapping):
            keep = "all" if self.keep.get("type") == "all" else plain_amount(keep, "thinking_turns")
        if keep != "all" and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f'keep={self.keep!r} is neither a number of turns, 1 or more, nor "all"')
        object.__setattr__(self, "keep", keep)

    def edit(self) -> ClearThinkingEdit:
        """The provider's form of these settings."""
        keep = self.keep
        return ClearThinkingEdit(keep=Amount(type="thinking_turns", value=keep) if isinstance(keep, int) else "all")

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        """Evict old thinking, all of a message's or none; the text and calls of the message stay."""
        turns = self._old_turns(view) if isinstance(self.keep, int) else []
        leaving: list[int] = []
        figures = {"cleared_thinking_turns": 0, "cleared_input_tokens": 0}
        for turn in turns:
            freed = 0
            for message in {page.message: None for page in turn}:
                thoughts = [page for page in turn if page.message == message]
                saved = sum(page.tokens for page in thoughts) - view.handle * len(thoughts)
                if saved > 0 and not any(_is_bound(view, page) for page in thoughts):
                    leaving += [page.id for page in thoughts]
                    freed += saved
            figures["cleared_thinking_turns"] += freed > 0
            figures["cleared_input_tokens"] += freed
        if not leaving:
            return []
        yield Note(figures=figures)
        return [Evict(pages=tuple(leaving), why="old thinking")]

    def _old_turns(self, view: View) -> list[list[Page]]:
        """The thinking of each turn that loses it, newest turn first."""
        turns: list[list[Page]] = []
        started = False
        for page in reversed(view.pages):
            if page.role is Role.USER and page.message and not page.depth:
                started = False
            elif page.kind is Kind.REASONING:
                if not started:
                    turns.append([])
                    started = True
                turns[-1].append(page)
        keep = self.keep if isinstance(self.keep, int) else len(turns)
        return [[page for page in turn if page.id not in view.pins and not view.is_latest(page)] for turn in turns[keep:]]


def _is_bound(view: View, page: Page) -> bool:
    """Whether the provider may need it: its tool loop is not finished, or a part of it is pinned."""
    return page.id > view.task_page or any(member in view.open or member in view.pins for member in view.group(page.id))
