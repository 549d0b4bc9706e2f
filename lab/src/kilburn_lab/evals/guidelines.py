"""Measures how much an agent improves with each feedback, on a task with a hidden rule.

The agent sorts tickets by a hidden rule, which is a list of conditions and answers. The agent is a script that knows only its
prompt: it follows the most specific guideline that matches the ticket, otherwise the answer of the most similar example,
otherwise the most frequent answer. After a wrong answer the user gives the right answer, and in a fixed percentage of cases the
reason. The agent's answers to held-out tickets are counted at regular intervals: without memory, with examples only, with
guidelines only, and with both. The hidden rule decides which answers are right; it does not distil the feedback. Then the
feedback is forgotten step by step: half of it, and all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

import kilburn
from kilburn.errors import SpecError
from kilburn.memory.guidelines import Guidelines
from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.sample import HALVES

ARMS = ("none", "examples", "guidelines", "both")
COUNTS = (0, 1, 2, 4, 8, 16, 32)
OWNER, USUAL = "tickets", "normal"
LABELS = ("urgent", "later", "escalate", "refuse")
REASONS = 60
"""Percentage of feedback that gives the reason."""

PATIENCE = 600
"""Tickets after which the feedback ends, if the agent makes no mistake any more."""

Ticket = dict[str, str]

FIELDS: dict[str, tuple[str, ...]] = {
    "customer": ("gold", "silver", "bronze", "new"),
    "topic": ("refund", "parcel", "invoice", "password", "contract"),
    "channel": ("phone", "mail", "chat", "letter"),
    "tone": ("angry", "calm", "worried", "polite"),
}
WORDINGS = {
    "tune": (
        "A {customer} customer asks by {channel} about a {topic}, in a tone that is {tone}.",
        {"customer": "the customer is {}", "topic": "it is about a {}", "channel": "it came by {}", "tone": "the tone is {}"},
        "No, it should be {label}.",
        "No, it should be {label}, because {why}.",
    ),
    "report": (
        "Topic: {topic}. The customer is {customer}, writes by {channel} and sounds {tone}.",
        {"customer": "this is a {} customer", "topic": "the topic is {}", "channel": "they write by {}", "tone": "they sound {}"},
        "Wrong. That should have been {label}.",
        "Wrong. That should have been {label}, since {why}.",
    ),
}
"""A ticket, why it is decided as it is, and what a user says without and with a reason."""

_GUIDELINE = re.compile(r"^If (.+): (\w+)\.$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Request: (.+)\nFeedback: (.+)$", re.MULTILINE)
_SAYS = re.compile(r"should (?:be|have been) (\w+)")
_COMMON = frozenset(
    (
        *("a", "about", "an", "and", "asks", "by", "came", "customer", "in", "is", "it", "of", "sound", "sounds", "that", "the"),
        *("they", "this", "tone", "topic", "write", "writes"),
    )
)


class HiddenRule:
    """How the tickets of a seed are to be decided: the first condition that fits.

    Args:
        half: whose wordings its tickets and reasons have.
    """

    def __init__(self, seed: int, half: str, conditions: int = 5) -> None:
        self._chance = random.Random(f"guidelines/{seed}")
        self._ticket, self._reasons, self._bare, self._full = WORDINGS[half]
        pairs = [(field, value) for field, values in FIELDS.items() for value in values]
        self.conditions = [(pair, self._chance.choice(LABELS)) for pair in self._chance.sample(pairs, conditions)]

    def ticket(self) -> Ticket:
        """Any ticket."""
        return {field: self._chance.choice(values) for field, values in FIELDS.items()}

    def text(self, ticket: Ticket) -> str:
        """As the agent gets it."""
        return self._ticket.format(**ticket)

    def right(self, ticket: Ticket) -> str:
        """How it is to be decided."""
        return next((label for (field, value), label in self.conditions if ticket[field] == value), USUAL)

    def feedback(self, ticket: Ticket, *, reason: bool) -> str:
        """What a user says to a wrong answer: why, by all conditions that fit, because all of them matter to the decision."""
        fitting = [(field, value) for (field, value), _ in self.conditions if ticket[field] == value]
        why = " and ".join(self._reasons[field].format(value) for field, value in fitting)
        form = self._full if reason and why else self._bare
        return form.format(label=self.right(ticket), why=why)


def decided(prompt: str, ticket: str) -> str:
    """What the script answers to a ticket, by its prompt alone."""
    words = _words(ticket)
    fitting = [(len(_words(why)), label) for why, label in _GUIDELINE.findall(prompt) if _words(why) and _words(why) <= words]
    if fitting:
        return str(max(fitting)[1])
    near = [(len(_words(request) & words), said) for request, said in _EXAMPLE.findall(prompt)]
    if near:
        shared, said = max(near, key=lambda each: each[0])
        found = _SAYS.search(said)
        # Three of the four things that a ticket says.
        if found is not None and shared >= 3:
            return str(found[1])
    return USUAL


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", text.lower())) - _COMMON


class GuidelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Answers after so many feedbacks, with what is shown of them.

    Args:
        feedback: that was given; `forgotten` of it was forgotten again.
        right: the share of right answers, with its interval of 95% (rules are drawn); `more` than without memory.
        notes: guidelines and examples in force, the mean.
    """

    shown: str
    feedback: int
    forgotten: int
    answers: int
    right: float
    low: float
    high: float
    more: float
    more_low: float
    more_high: float
    notes: float


class GuidelineReport(EvalReport, frozen=True, kw_only=True):
    """Accuracy against the number of feedbacks, and after they are forgotten."""

    seed: int
    half: str
    rules: int
    rows: list[GuidelineRow]

    def table(self) -> str:
        """For people."""
        columns = (
            "shown={shown} | feedback={feedback} | forgotten={forgotten} | answers={answers} | right={right:.2f} | "
            "95%={low:.2f} {high:.2f} | more={more:+.2f} | 95% ={more_low:+.2f} {more_high:+.2f} | notes={notes:.1f}"
        )
        words = f"Means over {self.rules} hidden rules; a reason stands in {REASONS}% of the feedback."
        return f"{table_of(self.rows, columns, ('shown',))}\n{words}"


class _Answered(msgspec.Struct, frozen=True):
    rule: int
    shown: str
    feedback: int
    forgotten: int
    right: bool
    notes: int


def evaluate(
    arms: Sequence[str] = ARMS,
    *,
    rules: int = 4,
    feedback: int = 32,
    tickets: int = 40,
    half: str = HALVES[0],
    seed: int = 0,
    progress: Progress = unwatched,
) -> GuidelineReport:
    """Give feedback by some hidden rules, and count right answers after 0, 1, 2, 4, 8 ... of it.

    Args:
        rules: hidden rules. feedback: that is given for each, at most. tickets: that are answered each time.

    Raises:
        SpecError: no such arm or half, or fewer than one rule, feedback or ticket.
    """
    check_known("memory", arms, ARMS)
    check_known("half", [half], HALVES)
    if rules < 1 or feedback < 1 or tickets < 1:
        raise SpecError(f"rules={rules}, feedback={feedback}, tickets={tickets}", advice="give 1 or more of each")
    wanted = tuple(dict.fromkeys(("none", *arms)))
    counts = sorted({count for count in COUNTS if count < feedback} | {feedback})
    found: list[_Answered] = []
    progress(0, rules)
    for number in range(seed, seed + rules):
        found += _one(number, half, wanted, counts, tickets)
        progress(number - seed + 1, rules)
    keys = [("none", 0, 0), *((shown, count, 0) for shown in wanted if shown != "none" for count in counts)]
    keys += [("both", counts[-1], gone) for gone in (counts[-1] // 2, counts[-1]) if "both" in wanted and gone]
    rows = [_row(found, *key, seed) for key in keys]
    return GuidelineReport(seed=seed, half=half, rules=rules, rows=rows)


def _one(seed: int, half: str, arms: Sequence[str], counts: Sequence[int], tickets: int) -> list[_Answered]:
    """The answers under one hidden rule."""
    rule, chance = HiddenRule(seed, half), random.Random(f"guidelines/{seed}/users")
    asked = [rule.ticket() for _ in range(tickets)]
    found: list[_Answered] = []
    given: list[str] = []
    with kilburn.open(":memory:", window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        guidelines, session = Guidelines(store, OWNER), store.session("feedback", user=OWNER)

        def count(feedback: int, forgotten: int, shown: Sequence[str]) -> None:
            notes = len(guidelines.list()) + len(guidelines.examples())
            for ticket in asked:
                texts = _shown(guidelines, rule.text(ticket))
                for arm in shown:
                    right = _answer(texts, rule.text(ticket), arm) == rule.right(ticket)
                    found.append(_Answered(seed, arm, feedback, forgotten, right, notes))

        seen = 0
        for goal in counts:
            while len(given) < goal and seen < PATIENCE:
                seen += 1
                ticket = rule.ticket()
                answer = _answer(_shown(guidelines, rule.text(ticket)), rule.text(ticket), "both")
                if answer == rule.right(ticket):
                    continue
                said = rule.feedback(ticket, reason=chance.randrange(100) < REASONS)
                session.append({"role": "user", "content": rule.text(ticket)}, {"role": "assistant", "content": answer})
                given.append(session.append({"role": "user", "content": said}))
                session.append({"role": "assistant", "content": "Noted."})
                guidelines.learn(session)
            count(goal, 0, [arm for arm in arms if arm != "none" or goal == 0])
        if "both" in arms:
            chance.shuffle(given)
            half_of = len(given) // 2
            for at, address in enumerate(given, 1):
                guidelines.unalign(session, address)
                if at in (half_of, len(given)):
                    # Where the agent made no mistake any more, there was less feedback than was asked for.
                    count(counts[-1], counts[-1] // 2 if at == half_of else counts[-1], ("both",))
    return found


def _shown(guidelines: Guidelines, ticket: str) -> list[str]:
    return [message.parts[0].text for message in guidelines.messages(ticket)]


def _answer(shown: Sequence[str], ticket: str, arm: str) -> str:
    """What is answered to a ticket beside what an arm shows of the guidelines and the examples."""
    kept = [text for text in shown if arm == "both" or text.startswith(f"<{arm}-")]
    return decided("\n".join((*kept, f"Ticket: {ticket}")), ticket)


def _row(found: Sequence[_Answered], shown: str, feedback: int, forgotten: int, seed: int) -> GuidelineRow:
    mine = [one for one in found if (one.shown, one.feedback, one.forgotten) == (shown, feedback, forgotten)]
    base = [one for one in found if one.shown == "none"]
    pairs = list(zip(mine, base, strict=True))
    low, high = interval(grouped((one.rule, float(one.right)) for one in mine), seed)
    more = grouped((one.rule, float(one.right) - float(other.right)) for one, other in pairs)
    more_low, more_high = interval(more, seed)
    return GuidelineRow(
        shown=shown,
        feedback=feedback,
        forgotten=forgotten,
        answers=len(mine),
        right=mean(float(one.right) for one in mine),
        low=low,
        high=high,
        more=mean(value for group in more for value in group),
        more_low=more_low,
        more_high=more_high,
        notes=mean(one.notes for one in mine),
    )
