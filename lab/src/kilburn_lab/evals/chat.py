"""A chat: hundreds of short questions and answers, of which a few ask for something that was said long ago.

It is made up from a seed. Most of it can be answered without the past, so a policy that turns the window over at every question
pays for that here: what matters beside the answers is how much of the prefix stays, and the processor's time for a turn at the
beginning and at the end. Each fact is said once, by the user or by the assistant, and no reply repeats it.

    report = evaluate(policies=["fifo", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from kilburn.errors import SpecError
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.baselines import CHARACTERS, compared
from kilburn_lab.evals.candidate import KilburnCandidate, contender_of
from kilburn_lab.evals.cost import Bill, bill_table, bills_of
from kilburn_lab.evals.intervals import mean
from kilburn_lab.evals.measure import SYLLABLES, Progress, coined, unwatched
from kilburn_lab.evals.outcomes import PolicyCounts, Shipping
from kilburn_lab.evals.prefix import WORDS as PREFIX_WORDS
from kilburn_lab.evals.prefix import text_of
from kilburn_lab.evals.questions import RunQuestion
from kilburn_lab.evals.readers import ANSWER, ExactReader, Reader
from kilburn_lab.evals.report import EvalReport, best_words, table_of
from kilburn_lab.evals.roster import entries

LENGTH = 600
"""Questions and answers of a chat."""

WINDOW = 8000

TOLD = 0.25
"""Share of the exchanges in which something is said that may be asked for later."""

ASKED = 0.12
"""Share of the exchanges that ask for something that was said."""

LONG_AGO = 0.75
"""Share of these that ask for something said at least `AGO` exchanges before; the others ask for something newer."""

AGO = 120

ENDS = 0.1
"""Share of the exchanges at each end of a chat over which the processor's time is given."""

_FACTS = (
    ("user", "The plumber for the {thing} is called {name}. What should I have ready?", "Who is the plumber for the {thing}?"),
    (
        "user",
        "I keep the key of the {thing} under {number}. Is that wise?",
        "Under which number do I keep the key of the {thing}?",
    ),
    ("user", "The {thing} cost me {number} euros. Was that much?", "How much did I pay for the {thing}?"),
    ("user", "My neighbour {name} wants the {thing} in spring. Should I sell?", "Which neighbour of mine wants the {thing}?"),
    ("assistant", "For the {thing} take the paint {name}, in two thin coats.", "Which paint did you name for the {thing}?"),
    ("assistant", "Set the {thing} to {number} and wait an hour.", "To what should I set the {thing}?"),
    ("assistant", "The manual of the {thing} calls that fault {name}.", "What does the manual of the {thing} call the fault?"),
    ("assistant", "Order part {number} for the {thing} from the maker.", "Which part did you say I need for the {thing}?"),
)
"""Who says a fact, how, and how it is asked for."""

(_THINGS,) = (
    names.split()
    for names in (
        "attic balcony barn basement bathtub bicycle blinds boiler bookcase canoe carport chimney cistern compressor cooker "
        "cupboard dishwasher doorbell dryer fence fireplace freezer garage gate greenhouse gutter hallway heater hedge ladder "
        "lamp lawnmower letterbox loft mixer oven pantry patio pergola piano pond porch press printer projector pump radiator "
        "roof sander sauna scooter shed shower shutters sink skylight sofa stairs stove tent terrace tiller toaster trailer "
        "treadmill turntable wardrobe washer well winch windmill workbench",
    )
)
_ASKS = (
    "How do I clean the {thing} without scratching it?",
    "Is it worth repairing the {thing}, or should I replace it?",
    "What do people usually forget about a {thing}?",
    "How long does a {thing} last if one looks after it?",
    "Can I leave the {thing} outside over the winter?",
    "Which tool would you take for the {thing}?",
    "And how loud may a {thing} be in the evening?",
    "Thanks. Does the same hold for the {thing}?",
)
_SAYS = (
    "Lukewarm water and a soft cloth are enough",
    "Start small and test it in a corner",
    "Most of them are replaced too early",
    "Check the screws twice a year",
    "A cover keeps the rain out but lets the damp stay",
    "It depends on how often it is used",
    "Ask the maker before you drill",
    "An hour a month is usually enough",
    "The cheap ones bend, so take a stronger one",
    "Let it dry for a day before you go on",
    "I would do it in the morning, when it is cool",
    "Nothing is lost if you wait until spring",
)


class ChatTurn(NamedTuple):
    """What the user says, what the assistant answers, and the question about an older exchange, if the user asks one."""

    said: str
    reply: str
    question: RunQuestion | None = None


class _Fact(NamedTuple):
    at: int
    text: str
    value: str
    question: str


def chat(length: int = LENGTH, seed: int = 0) -> list[ChatTurn]:
    """A chat of so many exchanges; the same seed gives the same chat, and a longer one begins as a shorter one does.

    Raises:
        SpecError: a length below 1.
    """
    if length < 1:
        raise SpecError(f"a chat of {length} exchanges", advice="give 1 or more")
    chance = random.Random(f"chat/{seed}")
    made: list[ChatTurn] = []
    facts: list[_Fact] = []
    pairs = [(kind, thing) for kind in range(len(_FACTS)) for thing in _THINGS]
    chance.shuffle(pairs)
    used: set[str] = set()
    for at in range(length):
        drawn = chance.random()
        due = _due(facts, at, chance) if drawn < ASKED else None
        said, reply = chance.choice(_ASKS).format(thing=chance.choice(_THINGS)), _advice(chance)
        question = None
        if due is not None:
            facts.remove(due)
            said, reply = due.question, f"That is as it was said. {_advice(chance)}"
            before, after = due.text.split(due.value)
            fact = f"{re.escape(before)}(.+?){re.escape(after)}"
            question = RunQuestion("chat", due.question, due.value, fact, _age(made, due.at))
        elif drawn < ASKED + TOLD and pairs:
            kind, thing = pairs.pop()
            who, form, asked = _FACTS[kind]
            name = coined(chance, SYLLABLES, 3, used).capitalize()
            text = form.format(thing=thing, name=name, number=(number := chance.randrange(1000, 100_000)))
            facts.append(_Fact(at, text, name if "{name}" in form else str(number), asked.format(thing=thing)))
            said, reply = (text, reply) if who == "user" else (said, f"{text} {reply}")
        made.append(ChatTurn(said, reply, question))
    return made


def _due(facts: Sequence[_Fact], at: int, chance: random.Random) -> _Fact | None:
    """A fact to ask for: one said long ago, or a newer one."""
    long_ago = chance.random() < LONG_AGO
    fitting = [fact for fact in facts if (at - fact.at >= AGO) == long_ago]
    return chance.choice(fitting) if fitting else None


def _age(made: Sequence[ChatTurn], at: int) -> int:
    """Tokens from an exchange to now."""
    return sum(len(one.said) + len(one.reply) for one in made[at:]) // CHARACTERS


def _advice(chance: random.Random) -> str:
    """Some sentences that answer no question."""
    return " ".join(f"{said}." for said in chance.sample(_SAYS, chance.randint(1, 4)))


class ChatRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one window. Tokens are of four characters; intervals are of 95%, resampled by question.

    Args:
        exchanges: questions and answers. questions: those that ask for something that was said before.
        right: share of these that the reader answered from the prompt. old: of those about something older than the window holds;
            None if there are none.
        best: of the baselines that were measured at this window, the one with most right answers.
        gain: less the share of `best`, on the same questions.
        kept: the share of the prefix kept (`kilburn_lab.evals.prefix`); None for a chat of one exchange.
        edited: prompts that do not begin with all of the prompt before. broken: with less than half of it.
        again: tokens that were told before and are read again after an edit. shipped: tokens of all prompts. again_share: the
            one over the other.
        first, last: milliseconds of the processor for a turn, which is two appends and one rendering, with the policy's plans:
            the mean over the first and over the last tenth of the chat.
        overflow: prompts over the window. failed: plans in which the policy raised, or returned nonsense.
    """

    policy: str
    window: int
    exchanges: int
    questions: int
    right: float
    low: float
    high: float
    old: float | None
    best: str
    gain: float
    gain_low: float
    gain_high: float
    kept: float | None
    edited: int
    broken: int
    again: int
    again_share: float
    shipped: int
    first: float
    last: float
    overflow: int
    failed: int


class ChatReport(EvalReport, frozen=True, kw_only=True):
    """All rows; `words` says what was asked of whom, `bills` have what providers are paid for each right answer."""

    words: str
    rows: list[ChatRow]
    bills: list[Bill]

    def table(self) -> str:
        """Plain text: a line for each policy and window."""
        text = (
            "window={window} | policy={policy} | right={right:.3f} | 95%={low:.2f}-{high:.2f} | "
            "to best, 95%={gain:+.3f} {gain_low:+.2f} {gain_high:+.2f} | old={old:.2f} | kept={kept:.2f} | edited={edited} | "
            "broken={broken} | again={thousands[0]:,.0f} | share={again_share:.2f} | shipped={thousands[1]:,.0f} | "
            "ms={first:.1f} | last={last:.1f} | over={overflow}"
        )
        rows = table_of(self.rows, text, thousands=lambda row: (row.again / 1000, row.shipped / 1000))
        words = (
            f"{PREFIX_WORDS}\nold: questions about what was said longer ago than the window is; edited, broken: prompts that do "
            "not begin with all,\nand with less than half, of the prompt before; shipped: thousands of tokens;\n"
            "ms: of the processor for a turn, in the first and in the last tenth"
        )
        best = best_words("share of right answers", self.rows)
        return "\n\n".join([self.words, f"{best}\n{words}", rows, bill_table(self.bills, "right answers")])


def evaluate(
    length: int = LENGTH // 3,
    *,
    windows: Sequence[int] = (WINDOW,),
    policies: Sequence[str] = EVERYBODY,
    reader: Reader | None = None,
    pause: float | None = None,
    seed: int = 0,
    progress: Progress = unwatched,
) -> ChatReport:
    """Have the same chat under each policy at each window; the newest text always takes part.

    Args:
        length: exchanges.
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies.
        reader: who answers the questions; None for the exact reader.
        pause: seconds between two prompts; None if a cached prefix never expires.
        seed: of the chat and of the intervals.
        progress: called with the exchanges done and their total.

    Raises:
        SpecError: a number below 1, no such policy, or no question in so short a chat.
    """
    if not windows or min(windows) < 1:
        raise SpecError(f"windows={list(windows)}", advice="give one or more, of 1 token or more")
    talk = chat(length, seed)
    if not any(one.question for one in talk):
        raise SpecError(f"a chat of {length} exchanges has no question", advice="make it longer")
    who = reader or ExactReader()
    jobs = [(entry, window) for window in dict.fromkeys(windows) for entry in entries(list(policies), "", window)]
    done: list[_Talked] = []
    progress(0, len(jobs) * length)
    for entry, window in jobs:
        talked = _Talked(PolicyCounts(policy=entry.label, window=window), [], [])
        for count, _ in enumerate(_talk(talk, entry.at(window), talked, who), len(done) * length + 1):
            progress(count, len(jobs) * length)
        done.append(talked)
    asked = [one.question for one in talk if one.question is not None]
    words = f"a chat of {length} questions and answers, {len(asked)} about something that was said before, seed {seed}; "
    words += f"the {who.name} reader; one token is {CHARACTERS} characters"
    bills = bills_of([(one.cell, sum(one.right)) for one in done], pause)
    return ChatReport(words=words, rows=[_row(one, done, asked, seed) for one in done], bills=bills)


class _Talked(NamedTuple):
    """A chat under one policy: what was counted, which answers were right, and the milliseconds of each turn."""

    cell: PolicyCounts
    right: list[bool]
    times: list[float]


def _talk(talk: Sequence[ChatTurn], spec: str, talked: _Talked, reader: Reader) -> Iterator[ChatTurn]:
    """Each exchange when it is over."""
    cell, shipping = talked.cell, Shipping()
    with contender_of(cell.window, spec, tools=True) as own:
        for one in talk:
            began = time.thread_time()
            own.user(one.said)
            prompt = own.prompt()
            spent = time.thread_time() - began
            shipping.tell(one.said)
            shipping.ship(prompt, cell)
            if one.question is not None:
                verb, text = reader.reply(one.question, text_of(prompt), [], tools=False)
                talked.right.append(verb == ANSWER and text == one.question.answer)
            began = time.thread_time()
            own.thought(one.reply)
            talked.times.append((spent + time.thread_time() - began) * 1000)
            shipping.tell(one.reply)
            yield one
        if isinstance(own, KilburnCandidate):
            cell.failed += own.stats().policy_failures


def _row(talked: _Talked, done: Sequence[_Talked], asked: Sequence[RunQuestion], seed: int) -> ChatRow:
    cell, times = talked.cell, talked.times
    here = {one.cell.policy: [float(right) for right in one.right] for one in done if one.cell.window == cell.window}
    old = [right for right, question in zip(talked.right, asked, strict=True) if question.age > cell.window]
    end = max(1, round(ENDS * len(times)))
    return ChatRow(
        policy=cell.policy,
        window=cell.window,
        exchanges=len(times),
        questions=len(asked),
        right=mean(here[cell.policy]),
        **compared(here, cell.policy, range(len(asked)), seed),
        old=mean(old) if old else None,
        kept=cell.kept,
        edited=cell.edited,
        broken=cell.broken,
        again=cell.refilled,
        again_share=cell.again_share,
        shipped=cell.shipped,
        first=fmean(times[:end]),
        last=fmean(times[-end:]),
        overflow=cell.overflow,
        failed=cell.failed,
    )
