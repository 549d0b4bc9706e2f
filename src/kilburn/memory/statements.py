"""Extracts what a message states about its writer, by patterns and without a model.

Each statement is one sentence in the third person, with its parts and its times of validity. Precision comes before recall:
doubtful statements are left out, but a search still finds the words in the session. The patterns are for English; other
languages yield nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from kilburn.memory import english
from kilburn.memory.clauses import HOLE, Clause, clauses
from kilburn.page import Claim
from kilburn.search.dates import Dated, dates, grounded

USER = "user"
ASSISTANT = "assistant"
"""The subject of standing instructions."""

MAX_STATEMENTS = 50
"""Statements of one message at most."""


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One statement of a message.

    Args:
        text: a sentence in the third person, with absolute dates.
        since, until: validity in seconds since the epoch; None if the statement names no time.
        over: whether the claim is no longer true.
        replaces: whether it replaces an earlier statement on the same topic: a meeting was moved.
        instead: the wrong object in a "not X". A claim without a relation corrects the fact with this object; without a wrong
            object, it corrects the previous statement.
    """

    text: str
    claim: Claim
    since: float | None = None
    until: float | None = None
    importance: float = 0.0
    over: bool = False
    replaces: bool = False
    instead: str = ""


_ONLY_ONE_WORDS = "wife husband partner girlfriend boyfriend mother mom mum father dad boss"
_ONLY_ONE = frozenset(_ONLY_ONE_WORDS.split())
_NAME = english.text("statements.name")
_NO_NAME = frozenset(english.text("statements.no_names").split("|"))
_ADVERB = english.text("statements.adverb")
_SHORT = [
    (re.compile(r"\b[Ii]'?m\b"), "I am"),
    (re.compile(r"\b([Ww]e|[Tt]hey|[Yy]ou)'re\b"), r"\1 are"),
    (re.compile(r"\b(I|i|[Ww]e)'ve\b"), r"\1 have"),
    (re.compile(r"\b(I|i|[Ww]e)'ll\b"), r"\1 will"),
    (re.compile(r"\b([Ii]t|[Tt]hat|name|[Hh]e|[Ss]he)'s\b"), r"\1 is"),
    (re.compile(r"\b([Cc])an(?:'t|not)\b"), r"\1an not"),
    (re.compile(r"\b(do|does|is|are|was|have|has)n't\b"), r"\1 not"),
]
_SELF = english.pattern("statements.self", re.DOTALL)
_THEIRS = english.pattern("statements.theirs", re.DOTALL)
_BASE = {"is": "am", "are": "am", "has": "have", "was": "was", "does": "do", "studies": "study", "teaches": "teach"}
_THIRD = english.pattern("statements.third")

_ANAPHORA = english.pattern("statements.anaphora", re.IGNORECASE)
_EMPTY = english.pattern("statements.empty", re.IGNORECASE)
_TAIL = english.pattern("statements.tail", re.IGNORECASE)
_OBJECT_ENDS = english.pattern("statements.object_ends", re.DOTALL)
_TO_THAT = english.pattern("statements.to_that")
_COMMA = english.pattern("statements.comma", re.DOTALL)
_ASIDE = english.pattern("statements.aside")
_NOT = english.pattern("statements.not")


_STATES = english.text("statements.states")
_NO_IDENTITY = english.pattern("statements.no_identity", re.IGNORECASE)

_RULES = [
    (re.compile(english.expand(rule["pattern"]) + r"\Z", re.DOTALL), str(rule["relation"]), bool(rule["many"]))
    for rule in english.SECTIONS["statements"]["rules"]
]
_SAYS = {"drive": "drives", "own": "owns", "speak": "speaks", "collect": "collects", "play": "plays", "teach": "teaches"}
_SAYS |= {"study": "studies", "volunteer": "volunteers", "coach": "coaches"}

_ORDER = english.pattern("statements.order", re.IGNORECASE | re.DOTALL)
_ORDERED = english.pattern("statements.ordered", re.IGNORECASE)
_MEMO = english.pattern("statements.memo", re.IGNORECASE | re.DOTALL)
_CALL_ME = english.pattern("statements.call_me")
_MY_NAME = english.pattern("statements.my_name")
_I_AM = english.pattern("statements.i_am")
_I_AM_A = english.pattern("statements.i_am_a")
_KIN_NAME = english.pattern("statements.kin_name")
_APPOSED = english.pattern("statements.apposed")
_FAVOURITE = english.pattern("statements.favourite")
_IS_FAVOURITE = english.pattern("statements.is_favourite")
_MINE_IS = english.pattern("statements.mine_is")
_THE_IS = english.pattern("statements.the_is")
_HAVE_EVENT = english.pattern("statements.have_event")
_RESCHEDULED = english.pattern("statements.rescheduled")
_BIRTHDAY = english.pattern("statements.birthday")
_GOAL = english.pattern("statements.goal")
_NO_MORE = english.pattern("statements.no_more")
_IT_IS_NOT = english.pattern("statements.it_is_not", re.IGNORECASE)
_IT_IS = english.pattern("statements.it_is")
_HABIT = english.pattern("statements.habit")


def statements(text: str, said_at: float) -> list[Statement]:
    """Return what a message states, in order, at most 50 statements, without repetitions.

    Args:
        said_at: time of the message in seconds since the epoch; "next Tuesday" is relative to it.
    """
    by_claim: dict[tuple[str, str, str, bool], Statement] = {}
    for clause in clauses(text):
        for statement in _parse_clause(clause, said_at):
            claim = statement.claim
            key = (claim.subject, claim.relation, claim.object, statement.over)
            by_claim.pop(key, None)  # the last one counts
            by_claim[key] = statement
        if len(by_claim) >= MAX_STATEMENTS:
            break
    return list(by_claim.values())[:MAX_STATEMENTS]


def _parse_clause(clause: Clause, said_at: float) -> Iterator[Statement]:
    rest, text = _plain(clause.rest), _plain(clause.text)
    order = _instruction(rest)
    if order is not None:
        yield order
        return
    memo = _MEMO.match(rest)
    if memo is not None:
        yield from _memo(memo["what"], said_at)
        return
    if (apposition := _I_AM_A.match(text)) is not None:
        yield from _apply_rules(USER, f"am {apposition['o']}", said_at)
    for match in _APPOSED.finditer(text):
        if (relative := _relative(match["kin"], match["o"])) is not None:
            yield relative
    wrong = _NOT.search(text)
    correction = clause.fix or wrong is not None
    body = text[: wrong.start()] if wrong else text
    for statement in _match_clause(body, said_at):
        claim = msgspec.structs.replace(statement.claim, correction=correction)
        yield msgspec.structs.replace(statement, claim=claim, instead=wrong["wrong"] if wrong else "")
    meant_match = _IT_IS.match(text)
    if meant_match is not None and (clause.fix or not text.lower().startswith("it is")):
        yield Statement(text=meant_match["o"], claim=Claim(subject=USER, object=meant_match["o"], correction=True))
    if (fixed := _IT_IS_NOT.match(text)) is not None:
        right, wrong_object = (fixed["o1"] or fixed["o2"]).strip(), (fixed["w1"] or fixed["w2"]).strip()
        if _is_object(right) and _is_object(wrong_object):
            yield Statement(text=right, claim=Claim(subject=USER, object=right, correction=True), instead=wrong_object)


def _plain(text: str) -> str:
    for pattern, long in _SHORT:
        text = pattern.sub(long, text)
    return text


def _match_clause(text: str, said_at: float) -> Iterator[Statement]:
    """Yield the statements of one clause; the first pattern that fits has it."""
    for pattern, build in _FORMS:
        match = pattern.match(text)
        if match is not None:
            statement = build(match, said_at)
            if statement is not None:
                yield statement
                return
    if (over := _NO_MORE.match(text)) is not None and (over["more"] or "no longer" in text or "not" not in text[:10]):
        rest = over["rest"] if "am no" not in text[:10] else f"am {over['rest']}"
        yield from _apply_rules(USER, _present(rest), said_at, over=True)
        return
    if (parts := _SELF.match(text)) is not None:
        rest = parts["rest"]
        if "never" in parts["said"]:
            if not rest.startswith("have"):
                return
            rest = f"have never {rest[5:]}" if rest.startswith("have ") else rest
        yield from _apply_rules(USER, re.sub(r"\Aare\b", "am", rest), said_at)
    elif (parts := _THEIRS.match(text)) is not None:
        first, _, more = parts["rest"].partition(" ")
        base = _BASE.get(first) or (first[:-1] if _THIRD.match(first) else first)
        if first != base or first in ("was", "moved", "relocated"):
            name = f" {parts['called']}" if parts["called"] else ""
            yield from _apply_rules(f"{USER}'s {parts['kin'].lower()}{name}", f"{base} {more}", said_at)


def _present(rest: str) -> str:
    """Turn "living in Porto" into "live in Porto"."""
    forms = {"living": "live", "working": "work", "using": "use", "playing": "play", "liking": "like", "studying": "study"}
    first, _, more = rest.partition(" ")
    return f"{forms.get(first, first)} {more}"


def _apply_rules(subject: str, rest: str, said_at: float, *, over: bool = False) -> Iterator[Statement]:
    if not rest.startswith("have never "):
        rest = re.sub(rf"\A(am|have) {_ADVERB}+", r"\1 ", rest)
    for pattern, relation, many in _RULES:
        match = pattern.match(rest)
        if match is None:
            continue
        raw = match["o"]
        if relation == "event":
            yield from _event(subject, raw, said_at)
            return
        if relation in ("plans to", "is going to") and not dates(raw, said_at):
            return
        if relation == "is" and _NO_IDENTITY.match(raw):
            return
        if not relation:
            verb, _, raw = raw.partition(" ")
            relation = _SAYS[verb]
        move_dates = dates(raw, said_at, past=True) if "moved" in rest else []
        if move_dates:
            raw = re.sub(r"\s+(?:on|in|at|since|back)?\s*\Z", "", raw[: move_dates[0].span[0]])
        parsed = _parse_object(raw, said_at)
        if parsed is None:
            return
        thing, since, until = parsed
        if move_dates and move_dates[0].start <= said_at:
            since = move_dates[0].start
        if relation == "has been":
            since = _beginning(raw, said_at)
            if since is None:
                return
        if relation in ("is", "works as") and len(thing.split()) > 9:
            return
        yield _statement(subject, relation, thing, many=many, since=since, until=until, over=over)
        return


def _statement(
    subject: str,
    relation: str,
    thing: str,
    *,
    many: bool,
    text: str = "",
    since: float | None = None,
    until: float | None = None,
    importance: float = 0.0,
    over: bool = False,
) -> Statement:
    claim = Claim(subject=subject, relation=relation, object=thing, confidence=0.9, many=many)
    whose = f"The {subject}" if subject.startswith(USER) else subject
    text = text or f"{whose} {relation} {thing}."
    return Statement(text=text, claim=claim, since=since, until=until, importance=importance, over=over)


def _parse_object(
    raw: str, said_at: float, *, past: bool = False, words: int = 14
) -> tuple[str, float | None, float | None] | None:
    """Return the object that the words name, with the times between which the statement holds; None in doubt."""
    text = _OBJECT_ENDS.sub("", raw)
    if " " not in text.strip() and _TO_THAT.match(raw[len(text) :]):
        return None  # "escaping to that world"
    if not _is_list(text):
        comma = _COMMA.search(text)
        if comma is not None and not _ASIDE.match(comma[0]):
            return None  # "a safe, loving home": half of it would be wrong
        text = _COMMA.sub("", text)
    while (less := _TAIL.sub("", text)) != text:
        text = less
    text = text.strip(" ,.;:!?-–—\"'")
    if not _is_object(text, words):
        return None
    since = until = None
    text, days = grounded(text, said_at, past=past)
    for dated in days:
        preposition = _word_before(raw, dated)
        if preposition in ("until", "till", "through"):
            until = dated.end
        elif preposition in ("since", "starting", "from", "of"):
            since = dated.start
    return _for_others(text), since, until


def _word_before(raw: str, dated: Dated) -> str:
    """Return the word before a date, also "from" before "on Monday"."""
    words = [word for word in raw[: dated.span[0]].lower().split() if word not in ("on", "in", "the")]
    return words[-1] if words else ""


def _is_list(raw: str) -> bool:
    return bool(re.match(r"[\w' -]{2,25}(?:, [\w' -]{2,25})+,? (?:and|or) [\w' -]{2,25}\Z", raw))


def _is_object(text: str, words: int = 14) -> bool:
    return (
        bool(text)
        and HOLE not in text
        and len(text.split()) <= words
        and len(text) <= 160
        and re.match(r"[\w$€£#.]", text) is not None
        and text.count("(") == text.count(")")
        and not _ANAPHORA.search(text)
        and not re.fullmatch(rf"(?:{_EMPTY.pattern} ?)+", text, re.IGNORECASE)
        and not re.match(
            r"(?:the|being|seeing|hearing|knowing|when|look|idea|sound|to (?:be|hear|see|know|think|say|ask|get|make|have))\b",
            text,
            re.I,
        )
        and not re.search(
            r"\b(?:and|or|to|of|with|for|the|an?|my|in|on|at|from|by|as|than|is|are|was|be|very|more|about)\Z", text, re.I
        )
    )


def _for_others(text: str) -> str:
    """Turn the first person into the third: "my parents" becomes "their parents"."""
    for pattern, replacement in (
        (r"\bmy\b", "their"),
        (r"\bour\b", "their"),
        (r"\bme\b", "them"),
        (r"\bus\b", "them"),
        (r"\bmyself\b", "themself"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.IGNORECASE if pattern != r"\bus\b" else 0)
    return text


def _beginning(raw: str, said_at: float) -> float | None:
    """Return since when a state lasts that holds "for five years" or "since 2019"."""
    lasting = re.search(r"\bfor (?:about |over |almost |nearly |around |more than |the (?:past|last) )*(.+)\Z", raw)
    days = dates(f"{lasting[1]} ago", said_at) if lasting else dates(raw, said_at, past=True)
    return days[0].start if days and days[0].start <= said_at else None


def _event(subject: str, raw: str, said_at: float) -> Iterator[Statement]:
    """Yield something that was done on a day that is named."""
    parsed = _parse_object(raw, said_at, past=True, words=18)
    days = [dated for dated in dates(raw, said_at, past=True) if dated.start <= said_at]
    if parsed is None or not days or raw.startswith(("had to ", "got to ", "saw that ")):
        return
    verb, _, thing = parsed[0].partition(" ")
    start, end = days[0].span
    said_of = f"{raw[:start]} {raw[end:]}".partition(" ")[2]
    if re.sub(r"\b(?:back|in|on|at|up|with|to|the|a)\b", "", said_of).split():
        yield _statement(subject, verb, thing, many=True, since=days[0].start)


def _instruction(text: str) -> Statement | None:
    match = _ORDER.match(text)
    if match is None or len(text) > 400 or HOLE in text:
        return None
    task = match["what"].strip()
    if not _ORDERED.match(task) or len(task.split()) < 2:
        return None
    instruction = text.strip(" .!")
    claim = Claim(subject=ASSISTANT, relation="is told to", object=instruction, confidence=1.0, many=True)
    return Statement(text=f"The user's standing instruction: {instruction}.", claim=claim, importance=1.0)


def _memo(content: str, said_at: float) -> Iterator[Statement]:
    """Yield the statement in a request to remember something, or else its words."""
    content = content.strip(" .!")
    inner = [statement for clause in clauses(content) for statement in _match_clause(_plain(clause.text), said_at)]
    for statement in inner:
        yield msgspec.structs.replace(statement, importance=0.8)
    if (
        not inner
        and len(content.split()) > 2
        and len(content) <= 300
        and HOLE not in content
        and not re.search(r"\byou(?:'re|r)?\b", content)
    ):
        text = _for_others(re.sub(r"\b[Ii] am\b", "they are", grounded(content, said_at)[0]))
        text = re.sub(r"\b[Ii]\b", "they", text)
        claim = Claim(subject=USER, relation="wants remembered", object=text, confidence=1.0, many=True)
        yield Statement(text=f"The user wants remembered: {text}.", claim=claim, importance=0.8)


def _user_name(match: re.Match[str], said_at: float) -> Statement | None:
    name = match["o"]
    if name.split()[0].lower() in _NO_NAME or re.fullmatch(_STATES, name, re.IGNORECASE):
        return None
    name = name.title() if name.islower() else name
    return _statement(USER, "name", name, many=False, text=f"The user's name is {name}.", importance=0.8)


def _nickname(match: re.Match[str], said_at: float) -> Statement | None:
    name = match["o"]
    if name.split()[0].lower() in _NO_NAME:
        return None
    return _statement(USER, "is called", name, many=False, text=f"The user wants to be called {name}.", importance=1.0)


def _relative(kin: str, name: str) -> Statement | None:
    if name.split()[0].lower() in _NO_NAME or name.isupper():
        return None
    whose = f"{USER}'s {kin.lower()}"
    many = kin.lower() not in _ONLY_ONE
    return _statement(whose, "name", name, many=many, text=f"The name of the {whose} is {name}.")


def _kin_name(match: re.Match[str], said_at: float) -> Statement | None:
    return _relative(match["kin"], match["o"])


def _property(relation: str, text: str, words: int = 14) -> Callable[[re.Match[str], float], Statement | None]:
    """Return a reader of a property with one object, such as a birthday. `relation` has the matched relation as `{}`; `text` has
    relation and object."""

    def read(match: re.Match[str], said_at: float) -> Statement | None:
        name = match.groupdict().get("r", "").lower()
        parsed = _parse_object(match["o"], said_at, words=words)
        if parsed is None or _ANAPHORA.search(name):
            return None
        whole = relation.format(name)
        return _statement(USER, whole, parsed[0], many=False, text=text.format(whole, parsed[0]))

    return read


def _value(match: re.Match[str], said_at: float) -> Statement | None:
    """Read a property with a value: "My deadline is March 15", "my library has 45 sources"."""
    parsed = _parse_object(match["o"], said_at, words=8)
    topic = match["r"].strip()
    if (
        parsed is None
        or _ANAPHORA.search(topic)
        or len(topic.split()) > 6
        or re.search(r"\b(?:question|guess|point|concern|problem|heart)\b", topic)
    ):
        return None
    whole = match[0]
    verb = "has" if re.search(rf"{re.escape(topic)} (?:has|have)\b", whole) else "is"
    relation = re.sub(r"\bmy\b", "their", topic)
    return _statement(USER, relation, parsed[0], many=False, text=f"The user's {relation} {verb} {parsed[0]}.")


def _appointment(match: re.Match[str], said_at: float) -> Statement | None:
    """Return an appointment or a deadline, on a day that is named."""
    when, days = grounded(match["o"], said_at)
    if not days:
        when, days = grounded(f"on {match['o']}", said_at)
    parsed = _parse_object(when, said_at, words=10)
    topic = re.sub(r" (?:scheduled|set|booked|planned|coming up|to \w+)\Z", "", _for_others(match["r"].strip()))
    if parsed is None or not days or _ANAPHORA.search(topic) or topic.endswith(" from"):
        return None
    when = parsed[0] if re.match(r"(?:on|at|by|in|for) ", parsed[0]) else f"on {parsed[0]}"
    text = f"The {topic} is {when}." if match[0][0] in "Tt" else f"The user's {topic} is {when}."
    statement = _statement(USER, topic, parsed[0], many=True, text=text)
    return msgspec.structs.replace(statement, replaces=match.re is not _HAVE_EVENT)


def _habit(match: re.Match[str], said_at: float) -> Statement | None:
    parsed = _parse_object(match["o"], said_at)
    if parsed is None or re.match(
        r"(?:was|were|am|had|have|did|went|know|think|see|feel|will|can|met|look|need|want|hope|just|have|started)\b", parsed[0]
    ):
        return None
    return _statement(USER, "habit", parsed[0], many=True, text=f"The user's habit: {parsed[0]}.")


_FORMS = [
    (_MY_NAME, _user_name),
    (_I_AM, _user_name),
    (_CALL_ME, _nickname),
    (_KIN_NAME, _kin_name),
    (_BIRTHDAY, _property("birthday", "The user's {} is {}.", words=5)),
    (_FAVOURITE, _property("favorite {}", "The user's {} is {}.", words=8)),
    (_IS_FAVOURITE, _property("favorite {}", "The user's {} is {}.", words=8)),
    (_RESCHEDULED, _appointment),
    (_HAVE_EVENT, _appointment),
    (_THE_IS, _appointment),
    (_GOAL, _property("{}", "The user's {} is to {}.")),
    (_MINE_IS, _value),
    (_HABIT, _habit),
]
