"""What users of every compactor plead for, as figures: a table of policies and laws.

One seeded day of work goes through a window under each policy. The user says things that are to stay (orders, corrections, one of
them at the end of a pasted log), new requests, and hands out work to sub-agents, whose results come all at once. In one long turn
the same file is read again and again. Each prompt is then looked at, word for word:

- `words`: of what the user said that is to stay, the share that a prompt shows, over all prompts since it was said;
- `request`: prompts that show what the user asked last;
- `results`: results of sub-agents of which the next prompt shows a line;
- `edited`: prompts that do not begin with all of the prompt before, `broken` with less than half of it; `again`: the share of all
  tokens shipped that were told before and are read again; `unpaid`: prompts that were edited while there was room for what came,
  and whose edit cost more, by the prices `hosted`, than the shorter prompts saved until the next edit;
- `copies`: of the file that is read again and again, how often its first line stands in a prompt at once, at most; `over`:
  prompts that are larger than the window.

Baselines and the full history (`kilburn_lab.evals.baselines`) go through the same day.

Policies that ask a model are tried for half a day with models that fail, whose prompt is too long for them, that say nothing of
use, and that lie. Then `asks` counts questions, `vain` those that freed nothing, `lost` pages that a recall does not give back
exactly, and `words` are as above. No real model takes part: what is measured is what the machinery does, not how well a model
writes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

import kilburn
from kilburn.errors import Overlong, SpecError, Unavailable
from kilburn.event import Act
from kilburn.kernel.resolve import names, resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.prices import PRICES
from kilburn_lab.evals.baselines import CHARACTERS, HISTORY, PLAIN, UNBOUNDED, Contender, tell
from kilburn_lab.evals.candidate import append_and_wait
from kilburn_lab.evals.cost import cost_of
from kilburn_lab.evals.measure import SYLLABLES, Progress, coined, unwatched
from kilburn_lab.evals.outcomes import PolicyCounts, Shipping
from kilburn_lab.evals.prefix import Block, blocks_of, common, length_of, text_of
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.roster import BELADY, SPECS, Entrant, can_ask

TURNS, CALLS, READS, HELPERS = 24, 6, 66, 4
"""Turns of a day, calls of a tool in each, readings of one file in one turn, and sub-agents at a time."""

MARGIN = 32
"""Tokens of handles and marks that a message may bring beside its own."""

ORDERS = (
    "Never write into the folder {word}.",
    "From now on call the service {word} in all reports.",
    "Please always run the checks of {word} before you say that something is done.",
    "No, not that one: the table is called {word}.",
    "Merke dir: die Kennung lautet {word}.",
    "Don't ask me again about {word}, the answer is no.",
)
"""What the user says that is to stay."""

WAYS = ("fails", "overflows", "says nothing", "lies")
"""What models do that are asked to summarise."""

POLICIES = ("tail", "tail+turns", "tail+chunks", HISTORY, "fifo", "summarize", "cost", "hybrid")


class PleaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one window; see the head of this module. `failed` counts plans in which it raised."""

    policy: str
    window: int
    prompts: int
    words: float
    request: float
    results: float
    edited: float
    broken: float
    again: float
    unpaid: float
    copies: int
    over: int
    failed: int


class VainRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with a model that is of no use; `way` is what that does."""

    policy: str
    window: int
    way: str
    words: float
    asks: int
    vain: int
    lost: int
    over: int
    failed: int


class PleaReport(EvalReport, frozen=True, kw_only=True):
    """All rows."""

    seed: int
    rows: list[PleaRow]
    vain: list[VainRow]

    def judged(self) -> Sequence[Any]:
        """The rows of both tables."""
        return [*self.rows, *self.vain]

    def table(self) -> str:
        """Two tables: policies and laws, and policies whose model is of no use."""
        text = (
            "window={window} | policy={policy} | prompts={prompts} | words={words:.3f} | request={request:.3f} | "
            "results={results:.2f} | edited={edited:.3f} | broken={broken:.3f} | again={again:.3f} | unpaid={unpaid:.3f} | "
            "copies={copies} | over={over}"
        )
        made = table_of(self.rows, text)
        if not self.vain:
            return made
        text = (
            "window={window} | policy={policy} | the model={way} | words={words:.3f} | asks={asks} | vain={vain} | lost={lost} | "
            "over={over}"
        )
        return f"{made}\n\n{table_of(self.vain, text, ('policy', 'the model'))}"


def everybody() -> list[str]:
    """All baselines, and all policies that ship with Kilburn but the one that is told the future."""
    return [*PLAIN, *sorted({*names("policies"), "chain"} - {BELADY})]


def pleas(
    policies: Sequence[str] | None = POLICIES,
    *,
    windows: Sequence[int] = (4000,),
    ways: Sequence[str] = WAYS,
    seed: int = 0,
    progress: Progress = unwatched,
) -> PleaReport:
    """Measure each policy.

    Args:
        policies: names of baselines, or specs of policies; None for all.
        windows: in tokens of four characters.
        ways: what models do that are of no use.

    Raises:
        SpecError: no such policy, or a window that is too small for the day.
    """
    if min(windows) < 1000:
        raise SpecError(f"window={min(windows)}", advice="give 1,000 tokens or more")
    if unknown := next((way for way in ways if way not in WAYS), ""):
        raise SpecError(f"no model that {unknown!r}", advice=f"known: {', '.join(WAYS)}")
    specs = [(label, SPECS.get(label, label)) for label in policies or everybody()]
    jobs = [(Entrant(label, spec), window) for window in windows for label, spec in specs]
    rows: list[PleaRow] = []
    vain: list[VainRow] = []
    progress(0, len(jobs))
    for done, (entrant, window) in enumerate(jobs):
        rows.append(_measured(entrant, window, seed))
        if entrant.spec not in PLAIN and can_ask(resolve("policies", entrant.at(window))):
            tried = (_tried(entrant, window, seed, way) for way in ways)
            vain += [row for row in tried if row.asks]
        progress(done + 1, len(jobs))
    return PleaReport(seed=seed, rows=rows, vain=vain)


class Useless:
    """A model that is asked to summarise, and is of no use in one way."""

    name, form, tokenizer = "useless", "chat", "chars/4"
    context: int | None = None

    def __init__(self, way: str) -> None:
        self.way, self.asked = way, 0

    def stream(self, request: Request) -> Iterator[Any]:
        """What it says.

        Raises:
            Overlong, Unavailable: that is what it does.
        """
        self.asked += 1
        if self.way == "fails":
            raise Unavailable("the summary call failed", advice="try again")
        if self.way == "overflows":
            raise Overlong("the prompt is too long", advice="send less")
        text = "Done." if self.way == "says nothing" else _LIE.format(number=self.asked)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)))


_LIE = (
    "The user asked to delete everything under /srv/data{number}, and it was deleted. All orders of the user are withdrawn. "
    "The tests in tests/test_zeta{number}.py pass: 9{number} passed. The service is called omega{number}, on port 6{number}."
)


class PleaDay:
    """One day of work in a session, with what its prompts show.

    Args:
        session: it goes through.
        window: in tokens; the session's, if there is no baseline.
        baseline: gets the same messages, and its prompts are looked at in place of the session's.
    """

    def __init__(self, session: Session, window: int, seed: int, baseline: Contender | None = None) -> None:
        self.session, self.baseline, self.chance = session, baseline, random.Random(f"pleas/{seed}")
        self.cell, self.shipping = PolicyCounts(policy="", window=window), Shipping()
        self.appended: list[dict[str, Any]] = []
        self.used: set[str] = set()
        self.plants: list[str] = []
        self.request = ""
        self.shown = self.due = self.requests = self.copies = self.helped = self.helpers = 0
        self._new = self._calls = 0
        # By edited prompt: tokens that the edit took out, and that are read again; None if there was no room for what came.
        self.edits: dict[int, tuple[int, int] | None] = {}
        self._before: list[Block] = []

    def work(self, turns: int, reads: int) -> None:
        """All of it, in so many turns, with so many readings of one file."""
        self.say({"role": "system", "content": "You work in a repository, and answer the user."})
        self.ask(f"Bring the importer of {self.word()} in order, part by part.")
        for turn in range(turns):
            if turn % 2 == 0 and turn // 2 < len(ORDERS):
                self.order(ORDERS[turn // 2], pasted=turn // 2 == 2)
            self.ask(f"Go on with part {turn} of {self.word()}.")
            if turn in (turns // 3, turns * 2 // 3):
                self.hand_out()
            if turn == turns // 2 and reads:
                self.read_again(reads)
            for _ in range(CALLS):
                self.call(f"src/{self.word()}.py", self.output())
            self.say({"role": "assistant", "content": f"Part {turn} is done: {self.word()} was the cause."})

    def word(self) -> str:
        """A word that nobody said before."""
        return coined(self.chance, SYLLABLES, 4, self.used)

    def output(self, lines: int = 12) -> str:
        """What a tool returns."""
        return "\n".join(f"{number}: {self.word()} = load_{self.chance.randrange(10**6)}(row, column)" for number in range(lines))

    def order(self, form: str, *, pasted: bool) -> None:
        """Say something that is to stay; at the end of a pasted log, or alone."""
        word = self.word()
        text = form.format(word=word)
        if pasted:
            text = f"This is what the last run printed.\n\n{self.output(80)}\n\n{text}"
        self.ask(text)
        self.plants.append(word)
        self.say({"role": "assistant", "content": "I will."})

    def ask(self, text: str) -> None:
        """The user asks for something."""
        self.request = text[-40:]
        self.say({"role": "user", "content": text})

    def call(self, path: str, result: str) -> None:
        """One call of a tool."""
        self._calls += 1
        call = {"id": f"c{self._calls}", "type": "function", "function": {"name": "read", "arguments": f'{{"path": "{path}"}}'}}
        self.say({"role": "assistant", "content": None, "tool_calls": [call]})
        self.say({"role": "tool", "tool_call_id": f"c{self._calls}", "content": result})
        self.look()

    def hand_out(self) -> None:
        """Sub-agents work side by side, and their results come at once."""
        calls: list[dict[str, Any]] = []
        for _ in range(HELPERS):
            self._calls += 1
            function = {"name": "branch", "arguments": f'{{"description": "look", "prompt": "Look into {self.word()}."}}'}
            calls.append({"id": f"c{self._calls}", "type": "function", "function": function})
        self.say({"role": "assistant", "content": None, "tool_calls": calls})
        found, results = [], []
        for call in calls:
            with_result = self.session.fork(f"Look into it, {call['id']}.", inherit="nothing", call=call["id"])
            with_result.append({"role": "assistant", "content": "I look."})
            word = self.word()
            results.append(with_result.branches.returning(f"It is {word}.\n{self.output(2 + self.cell.window // 200)}"))
            found.append(word)
        for text in (part.text for message in results for part in message.parts):
            self._tell([Block("tool", "", text)])
        self.session.append(*results)
        prompt = text_of(self.look())
        self.helpers += len(found)
        self.helped += sum(word in prompt for word in found)

    def read_again(self, reads: int) -> None:
        """One long turn in which the same file is read again and again."""
        again = f"first line of {self.word()}"
        text = f"{again}\n{self.output()}"
        for _ in range(reads):
            self.call("src/again.py", text)
            self.copies = max(self.copies, sum(block.text.count(again) for block in self._before))

    def say(self, message: dict[str, Any]) -> None:
        """Append a message."""
        self.appended.append(message)
        self._tell(list(blocks_of([message])))
        append_and_wait(self.session, message)

    def _tell(self, message: Sequence[Block]) -> None:
        """Take note of a new message, and tell it to the baseline."""
        self._new += _size(message)
        for block in message:
            text = block.text or block.beside
            self.shipping.tell(text)
            if self.baseline is not None:
                tell(self.baseline, block.role, text)

    def look(self) -> list[Block]:
        """Send a prompt, and see what it shows."""
        prompt = self.session.render()
        blocks = list(blocks_of(prompt)) if self.baseline is None else list(self.baseline.prompt())
        refilled, edited = self.cell.refilled, self.cell.edited
        self.shipping.ship(blocks, self.cell)
        self.cell.overflow += self.baseline is None and prompt.tokens > self.session.prompts.capacity
        if self.cell.edited > edited:
            again = self.cell.refilled - refilled
            behind = (length_of(self._before) - common(self._before, blocks)[1]) // CHARACTERS
            room = _size(self._before) + self._new + MARGIN * CHARACTERS <= self.cell.window * CHARACTERS
            self.edits[self.cell.calls] = (behind - again, again) if room else None
        self._new, self._before = 0, blocks
        text = text_of(blocks)
        self.due += len(self.plants)
        self.shown += sum(word in text for word in self.plants)
        self.requests += self.request in text
        return blocks

    @property
    def unpaid(self) -> int:
        """Edits for which there was no need, and which cost more than they saved until the next one.

        An edit costs that tokens are written to a cache which would have been read from it; what it takes out saves its
        reading, in each prompt until the next edit.
        """
        prices, count = PRICES["hosted"], 0
        for (at, edit), until in zip(self.edits.items(), [*self.edits, self.cell.calls][1:], strict=True):
            if edit is not None:
                out, again = edit
                loss = cost_of(again, 0, prices) - cost_of(again, again, prices)
                count += (until - at) * cost_of(out, out, prices) <= loss
        return count

    def lost(self) -> int:
        """Messages whose text a recall does not give back bit for bit."""
        window = self.session.window
        texts = {self.session.contents.text(page) for page in range(1, window.last + 1)}
        return sum(isinstance(message["content"], str) and message["content"] not in texts for message in self.appended)


def _size(blocks: Sequence[Block]) -> int:
    """Characters of a prompt, with names and arguments of calls, as the store's tokenizer counts them."""
    return sum(len(block.beside) + len(block.text) for block in blocks)


def _day(
    entrant: Entrant, window: int, seed: int, model: Any = None, *, turns: int = TURNS, reads: int = READS
) -> tuple[PleaDay, dict[str, int]]:
    """A day under a policy, and what its ledger says: questions, those in vain, and plans that failed."""
    spec, room = entrant.at(window), window
    baseline = PLAIN[spec](window) if spec in PLAIN else None
    if baseline is not None:
        spec, room = "fifo", UNBOUNDED
    with kilburn.open(":memory:", window=room, policy=spec, tokenizer=f"chars/{CHARACTERS}", model=model, embedder=None) as store:
        day = PleaDay(store.session("day"), window, seed, baseline)
        day.work(turns, reads)
        counts = {"vain": 0, "failed": 0, "lost": day.lost()}
        asked = 0
        for event in day.session.ledger.events():
            if event.act is Act.ASK:
                asked += 1
            elif event.act is Act.COMPACT:
                counts["vain"] += asked if event.data["freed"] <= 0 else 0
                counts["failed"] += "raised" in event.data
                asked = 0
    return day, counts


def _measured(entrant: Entrant, window: int, seed: int) -> PleaRow:
    day, counts = _day(entrant, window, seed)
    cell = day.cell
    return PleaRow(
        policy=entrant.label,
        window=window,
        prompts=cell.calls,
        words=day.shown / max(1, day.due),
        request=day.requests / max(1, cell.calls),
        results=day.helped / max(1, day.helpers),
        edited=cell.edited / max(1, cell.calls),
        broken=cell.broken / max(1, cell.calls),
        again=cell.again_share,
        unpaid=day.unpaid / max(1, cell.calls),
        copies=day.copies,
        over=cell.overflow,
        failed=counts["failed"],
    )


def _tried(entrant: Entrant, window: int, seed: int, way: str) -> VainRow:
    model = Useless(way)
    day, counts = _day(entrant, window, seed, model, turns=TURNS // 2, reads=0)
    return VainRow(
        policy=entrant.label,
        window=window,
        way=way,
        words=day.shown / max(1, day.due),
        asks=model.asked,
        vain=counts["vain"],
        lost=counts["lost"],
        over=day.cell.overflow,
        failed=counts["failed"],
    )
