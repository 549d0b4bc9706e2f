"""Old tool results become handles: Anthropic's `clear_tool_uses_20250919`, done here.

In place of the provider's placeholder there is a handle, with the address under which the result can be recalled.
What was cleared stays cleared, so one clearing breaks the cached prefix once; the provider is sent the whole history
each time and clears it again. `clear_at_least` avoids a clearing that costs much and frees little.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kilburn.effect import Answer, Effect, Note
from kilburn.message import Kind, Role
from kilburn.move import Evict, Fold, Move
from kilburn.page import Page
from kilburn.policy import View
from kilburn.wire.editing import Amount, ClearToolUsesEdit, plain_amount

HEAD = 40
"""Characters that stay of a call whose inputs are cleared."""


@dataclass(frozen=True)
class ClearToolUses:
    """Clear all but the last tool results at 100,000 tokens of prompt.

    Results that no reply has read yet stay. A window smaller than the trigger is cleared when it is over
    its capacity.

    Args:
        trigger: tokens in the window; or `{"type": "tool_uses", "value": n}`: whole tool results in it.
        keep: how many of the last tool uses stay whole.
        clear_at_least: tokens that one clearing must free, else it waits; None for any.
        exclude_tools: names of tools that are never cleared.
        clear_tool_inputs: also cut the calls to their first characters; a list names the tools for which.
    """

    trigger: int | Mapping[str, object] = 100_000
    keep: int | Mapping[str, object] = 3
    clear_at_least: int | Mapping[str, object] | None = None
    exclude_tools: Sequence[str] | None = ()
    clear_tool_inputs: bool | Sequence[str] | None = False

    def __post_init__(self) -> None:
        trigger = plain_amount(self.trigger, "input_tokens")
        uses = plain_amount(trigger, "tool_uses")
        keep, minimum = plain_amount(self.keep, "tool_uses"), plain_amount(self.clear_at_least, "input_tokens")
        for name, value, lowest in (
            ("trigger", uses, 1),
            ("keep", keep, 0),
            ("clear_at_least", 1 if minimum is None else minimum, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a number of {lowest} or more")
        for name in ("exclude_tools", "clear_tool_inputs"):
            tools = getattr(self, name)
            if isinstance(tools, str) or not all(isinstance(tool, str) for tool in (tools or () if tools is not True else ())):
                raise ValueError(f"{name}={tools!r} is no list of tool names")
            object.__setattr__(self, name, tools if isinstance(tools, bool) else tuple(tools or ()))
        object.__setattr__(self, "trigger", dict(trigger) if isinstance(trigger, Mapping) else trigger)
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "clear_at_least", minimum)

    def edit(self) -> ClearToolUsesEdit:
        """Return the provider's form of these settings."""
        minimum, inputs = self.clear_at_least, self.clear_tool_inputs
        unit, value = self._trigger
        return ClearToolUsesEdit(
            trigger=Amount(type=unit, value=value),
            keep=Amount(type="tool_uses", value=self._keep),
            clear_at_least=Amount(type="input_tokens", value=minimum) if isinstance(minimum, int) else None,
            exclude_tools=tuple(self.exclude_tools or ()),
            clear_tool_inputs=inputs if isinstance(inputs, bool) else tuple(inputs or ()),
        )

    @property
    def _trigger(self) -> tuple[str, int]:
        value = plain_amount(self.trigger, "tool_uses")
        unit = "tool_uses" if isinstance(self.trigger, Mapping) else "input_tokens"
        return unit, value if isinstance(value, int) else 0

    @property
    def _keep(self) -> int:
        return self.keep if isinstance(self.keep, int) else 0

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        """Evict the results of old tool uses, whose calls stay; nothing if that would free too little."""
        unit, threshold = self._trigger
        if not view.excess and unit == "input_tokens" and view.use <= threshold:
            return []
        uses: dict[int, list[Page]] = {}
        for page in view.pages:
            if page.answers:
                uses.setdefault(page.answers, []).append(page)
        if not view.excess and unit == "tool_uses" and len(uses) <= threshold:
            return []
        cleared = self._old(view, uses)
        inputs = self._inputs(view, cleared)
        freed = sum(cleared.values()) + sum(saved for _, saved in inputs)
        minimum = self.clear_at_least if isinstance(self.clear_at_least, int) else 1
        if not cleared or freed < minimum:
            return []
        yield Note(figures={"cleared_tool_uses": len(cleared), "cleared_input_tokens": freed})
        results = tuple(page.id for call in cleared for page in uses[call])
        return [*(fold for fold, _ in inputs), Evict(pages=results, why=f"all but the last {self._keep} tool uses")]

    def _old(self, view: View, uses: Mapping[int, Sequence[Page]]) -> dict[int, int]:
        """Return the tool uses to clear, oldest first, with the tokens that each saves."""
        last_reply = next((page.message for page in reversed(view.pages) if page.role is Role.ASSISTANT and page.message), 0)
        calls = sorted(uses)
        excluded, pinned = frozenset(self.exclude_tools or ()), {view.page(page).answers for page in view.pins}
        old: dict[int, int] = {}
        for call in calls[: len(calls) - self._keep]:
            pages = uses[call]
            call_page = view.page(call)
            if call_page.name in excluded or call in pinned or pages[-1].message > last_reply:
                continue
            # The cost of its handle is estimated at two characters a token, because counting thousands of handles takes
            # too long.
            handle = view.handle + (len(call_page.label) + len(call_page.call or "")) // 2
            saved = pages[0].tokens - handle
            for page in pages[1:]:
                saved += page.tokens - handle
            if saved > 0:
                old[call] = saved
        return old

    def _inputs(self, view: View, cleared: Mapping[int, int]) -> list[tuple[Fold, int]]:
        """Return excerpts of long calls whose results leave, and the tokens that each saves."""
        selection = self.clear_tool_inputs
        if not selection or not cleared:
            return []
        folds: list[tuple[Fold, int]] = []
        for page in view.pages:
            if page.kind is not Kind.CALL or page.id not in cleared or page.id in view.pins:
                continue
            if selection is not True and page.name not in selection:
                continue
            text = view.text(page.id)
            saved = page.tokens - view.count(text[:HEAD]) - view.count(f"{page.name} {page.call}") - 2 * view.handle
            if saved > 0 and len(text) > HEAD:
                folds.append((Fold(pages=(page.id,), keep=((0, HEAD),), why="inputs of a cleared tool use"), saved))
        return folds
