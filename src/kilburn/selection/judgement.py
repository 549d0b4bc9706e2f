"""Whether a model's summary of a stretch of transcript may stand for it.

A small model repeats itself, copies its prompt or writes about something else; a large one may still
lose the one path that matters. The judgement is deterministic and reads only strings: it compares
the facts of the summary with the facts of the sources. It does not grade style, and it cannot see
a false sentence made of true names.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kilburn.message import Kind
from kilburn.selection.extract import Piece
from kilburn.selection.facts import Fact, FactKind, facts
from kilburn.selection.identifiers import identifiers
from kilburn.selection.lines import OMISSION, sample


class Verdict(StrEnum):
    """What a summary is."""

    DONE = "done"
    """Fit to stand for its sources."""
    EMPTY = "empty"
    REFUSAL = "refusal"
    REPEATS = "repeats"
    ECHO = "echo"
    """A copy of the prompt, or of a source."""
    TOO_LONG = "toolong"
    DROPS = "drops"
    """Too few of the key facts are kept."""
    INVENTS = "invents"
    """It names what occurs nowhere in the sources."""


@dataclass(frozen=True, slots=True)
class KeyFact:
    """A fact that a summary should keep: a short value, its weight, and its last place."""

    kind: FactKind
    value: str
    weight: float
    page: int
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of the check.

    Args:
        coverage: share of the key facts' weight that the summary keeps, 0 to 1; 1 where there are none.
        missing: the key facts that it lost, the weightiest first.
        invented: paths, names and numbers of the summary that no source has.
        why: one line for the ledger.
    """

    verdict: Verdict
    coverage: float = 0.0
    missing: tuple[KeyFact, ...] = ()
    invented: tuple[str, ...] = ()
    why: str = ""

    @property
    def acceptable(self) -> bool:
        """Whether the summary may stand as it is."""
        return self.verdict is Verdict.DONE

    @property
    def reparable(self) -> bool:
        """Whether `complete` is worthwhile: facts are lost, but a fifth of their weight is there, so the summary is
        about this stretch."""
        return self.verdict is Verdict.DROPS and self.coverage >= 0.2


def judge(
    summary: str,
    pieces: Sequence[Piece],
    *,
    prompt: str = "",
    tokens: int | None = None,
    count: Callable[[str], int] = len,
    keep: float = 0.5,
) -> Judgement:
    """Return the first verdict that applies; garbage comes before lost facts.

    Args:
        prompt: the instruction that the model was given, so that its echo is known.
        tokens: what the summary may cost at most by `count`; None for no limit.
        keep: share of the key facts' weight that it must keep.
    """
    words = re.findall(r"\w+", summary.lower())
    letters, signs = sum(map(str.isalpha, summary)), len("".join(summary.split()))
    if letters < 12:
        return Judgement(Verdict.EMPTY, why=f"{letters} letters")
    if letters < 0.35 * signs:
        return Judgement(Verdict.REPEATS, why=f"{letters} letters in {signs} characters: little but numbers and signs")
    if _REFUSAL.match(summary):
        return Judgement(Verdict.REFUSAL, why=summary.strip()[:60])
    loop = _loop(summary, words)
    if loop:
        return Judgement(Verdict.REPEATS, why=loop)
    if tokens is not None and count(summary) > tokens:
        return Judgement(Verdict.TOO_LONG, why=f"{count(summary)} of {tokens} tokens")
    echo = _echo(words, pieces, prompt)
    if echo:
        return Judgement(Verdict.ECHO, why=echo)
    sources = "\n".join(text for piece in pieces for text in (piece.label, piece.text))
    facts = key_facts(pieces)
    low = summary.lower()
    missing = tuple(fact for fact in facts if not _has(low, fact))
    total = sum(fact.weight for fact in facts)
    kept = 1.0 - sum(fact.weight for fact in missing) / total if total else 1.0
    named, invented = _invented(summary, f"{sources}\n{prompt}".lower())
    if len(invented) > max(1, MAX_INVENTED * named):
        return Judgement(Verdict.INVENTS, kept, missing, invented, f"{len(invented)} of {named} names and numbers occur nowhere")
    if kept < keep:
        return Judgement(Verdict.DROPS, kept, missing, invented, f"keeps {kept:.0%} of {len(facts)} key facts")
    return Judgement(Verdict.DONE, kept, missing, invented, f"keeps {kept:.0%} of {len(facts)} key facts")


def mended(
    summary: str, pieces: Sequence[Piece], tokens: int, count: Callable[[str], int], prompt: str = ""
) -> tuple[str, Judgement]:
    """Return the usable text of a summary and its judgement: the whole text, completed with lost facts if needed, or "" if it
    cannot be trusted. See `judge`."""
    judged = judge(summary, pieces, prompt=prompt, tokens=tokens, count=count)
    if judged.acceptable:
        return summary, judged
    return complete(summary, judged.missing, pieces, tokens, count) if judged.reparable else "", judged


def garbage(summary: str, pieces: Sequence[Piece], prompt: str = "") -> Verdict | None:
    """Why a text is not a summary at all; None if it may be one.

    This is milder than `judge`: a line of numbers may be a valid summary.
    """
    words = re.findall(r"\w+", summary.lower())
    if not words:
        return Verdict.EMPTY
    if _REFUSAL.match(summary):
        return Verdict.REFUSAL
    if _loop(summary, words):
        return Verdict.REPEATS
    return Verdict.ECHO if _echo(words, pieces, prompt) else None


_REFUSAL = re.compile(
    r"\W*(?:(?:sure|okay|unfortunately)[,!.] ?)?(?:i(?: am|['’]?m) (?:(?:really|very|so|truly|deeply) )?(?:sorry|afraid)"
    r"|(?:we are |we['’]re )?sorry,|(?:i|we) apologi[sz]e|(?:my )?apologies,|as an ai\b|i(?: am"
    r"|['’]m) (?:just )?an ai\b|i(?: am|['’]m) (?:unable|not able)\b"
    r"|i (?:cannot|can['’]?t|can not|won['’]?t|will not) (?:assist|help|provide|summari[sz]e|condense|fulfil|comply|do|access|see"
    r"|create|continue|answer)"
    r"|i (?:do not|don['’]?t) (?:have (?:access|enough|the ability|any)|see (?:any|a)|understand)|(?:please|could you"
    r"|can you) (?:please )?(?:provide|share|paste|give) "
    r"|there is no (?:text|transcript|conversation|content)|it (?:seems|looks like) you (?:have not|haven'?t|didn'?t|forgot))",
    re.IGNORECASE,
)


SHORT = 400
"""Letters of a short summary that are searched for a loop."""

_REPETITION = re.compile(r"(?=.{12})(.{2,60}?)\1{2,}")
_TWICE = re.compile(r"(.{12,}?)\1+")


def _loop(summary: str, words: list[str]) -> str:
    """Why the summary counts as repeating itself, or ""."""
    rows = [row for row in (" ".join(line.lower().split()) for line in summary.splitlines()) if len(row) > 12]
    if len(rows) >= 4:
        share = 1 - len(set(rows)) / len(rows)
        if share >= 0.34:
            return f"{share:.0%} of the lines are repeated"
    if len(words) >= 24:
        grams = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
        share = 1 - len(grams) / grams.total()
        if share >= 0.3:
            return f"{share:.0%} of the four-word runs are repeated"
    elif words:
        flat = " ".join(words)[:SHORT] + " "
        loops = [match for match in _REPETITION.finditer(flat) if any(map(str.isalpha, match[1]))]
        twice = _TWICE.fullmatch(flat) is not None and any(map(str.isalpha, flat))
        if twice or sum(len(match[0]) for match in loops) >= 0.6 * len(flat):
            return "few words over and over"
    data = summary.encode("utf-8", "surrogatepass")
    if len(data) >= 160:
        tail = data[-400:]
        packed = min(len(zlib.compress(data)) / len(data), (len(zlib.compress(tail)) - 8) / len(tail))
        if packed < 0.24:
            return f"packs to {packed:.0%} of its size"
    return ""


_RUN = 6
MAX_INVENTED = 0.15
"""Share of the names and numbers of a summary that may occur in no source; one always may."""
MAX_KEY_FACTS, MAX_QUOTE_CHARS = 20, 240
_LARGE = 2_000_000


def _echo(words: list[str], pieces: Sequence[Piece], prompt: str) -> str:
    """Return why the summary counts as a copy, or "". Runs of six words are compared, in order."""
    if len(words) < 2 * _RUN:
        return ""
    summary_runs = [tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)]
    prompt_words = re.findall(r"\w+", prompt.lower())
    if len(prompt_words) >= _RUN:
        runs = {tuple(prompt_words[at : at + _RUN]) for at in range(len(prompt_words) - _RUN + 1)}
        share = sum(run in runs for run in summary_runs) / len(summary_runs)
        if share >= 0.5:
            return f"{share:.0%} of it is the prompt"
    total = sum(len(piece.text) for piece in pieces)
    source: list[str] = []
    distinct_runs = set(summary_runs)
    place: dict[tuple[str, ...], int] = {}
    indexed = 0
    # Piece by piece: one search of megabytes would block all other threads.
    for piece in pieces:
        for text in _read(piece, _LARGE * len(piece.text) // max(_LARGE, total)):
            source += re.findall(r"\w+", text.lower())
        for at in range(indexed, len(source) - _RUN + 1):
            run = tuple(source[at : at + _RUN])
            if run in distinct_runs:
                place.setdefault(run, at)
        indexed = max(indexed, len(source) - _RUN + 1)
    if not source:
        return ""
    copied = sum(run in place for run in summary_runs) / len(summary_runs)
    max_length = length = 0
    previous = -2
    for run in summary_runs:
        at = place.get(run, -2)
        if previous >= 0 and tuple(source[previous + 1 : previous + 1 + _RUN]) == run:
            at = previous + 1
        length = length + 1 if at >= 0 and at == previous + 1 else int(at >= 0)
        max_length, previous = max(max_length, length), at
    if copied >= 0.8 and len(words) >= 0.5 * len(source) and len(words) >= 40:
        return f"{copied:.0%} of it is copied, {len(words)} words of {len(source)}"
    if max_length + _RUN >= 40 and max_length >= 0.6 * len(summary_runs):
        return f"{max_length + _RUN - 1} words of it are copied in one run"
    return ""


def key_facts(pieces: Sequence[Piece]) -> tuple[KeyFact, ...]:
    """What a summary of the pieces should not lose, the weightiest first: the last test state, error
    classes, files that were changed or spoken of, names and numbers in decisions and errors.

    Each value is short enough to be found in a summary's own words. A value weighs more if it occurs in several
    pages, and later.
    """
    scores: dict[tuple[FactKind, str], float] = {}
    where: dict[tuple[FactKind, str], tuple[int, tuple[int, int]]] = {}
    piece_count = max(1, len(pieces))
    for at, piece in enumerate(pieces):
        recent = 0.6 + 0.4 * (at + 1) / piece_count
        prose = piece.is_prose
        page_weights: dict[tuple[FactKind, str], float] = {}
        for kind, value, weight, fact in _telling(facts(piece.text, prose=prose), prose, piece.kind == Kind.CALL):
            page_weights[kind, value] = max(page_weights.get((kind, value), 0.0), weight)
            where[kind, value] = (piece.page, fact.span)
        for key, weight in page_weights.items():
            scores[key] = scores.get(key, 0.0) + weight * recent
    ranked = sorted(scores, key=lambda key: (-scores[key], key))
    chosen: list[KeyFact] = []
    for kind, value in ranked:
        if len(chosen) >= MAX_KEY_FACTS or scores[kind, value] < 1.0:
            break
        if any(value in fact.value for fact in chosen):
            continue
        page, span = where[kind, value]
        chosen.append(KeyFact(kind, value, min(6.0, scores[kind, value]), page, span))
    return tuple(chosen)


_STATE = re.compile(
    r"\b\d+ (?:passed|failed|failures?|errors?|exceptions)\b|(?:failures|errors)=\d+|(?:exit(?:ed)?|code"
    r"|status)[: ]+(?:with )?(?:code |status )?-?\d+"
)


def _telling(
    facts_by_kind: Mapping[FactKind, Sequence[Fact]], prose: bool, call: bool
) -> list[tuple[FactKind, str, float, Fact]]:
    """Return kind, value, weight and fact of the key facts of one page."""
    result: list[tuple[FactKind, str, float, Fact]] = []
    for fact in facts_by_kind[FactKind.TEST][-3:]:
        result.extend((FactKind.TEST, state, 3.0, fact) for state in _STATE.findall(fact.value)[:3])
    telling = {fact.span: 2.0 for fact in facts_by_kind[FactKind.DECISION]}
    for fact in facts_by_kind[FactKind.ERROR][-4:]:
        telling[fact.span] = 1.5
    base = 1.0 if prose or call else 0.0
    for fact in facts_by_kind[FactKind.PATH]:
        weight = telling.get(fact.span, 0.0)
        if weight or prose or call:
            result.append((FactKind.PATH, _short(fact.value), 1.2 * max(weight, base), fact))
    for fact in facts_by_kind[FactKind.IDENTIFIER]:
        weight = telling.get(fact.span, 0.0)
        value = fact.value.rsplit("::", 1)[-1]
        if (weight or (prose and fact.times > 1)) and not (value.islower() and value.isalpha()):
            result.append((FactKind.IDENTIFIER, value, max(weight, 0.7), fact))
    for fact in facts_by_kind[FactKind.NUMBER]:
        if prose and telling.get(fact.span, 0.0) >= 2.0:
            result.append((FactKind.NUMBER, fact.value, 0.9, fact))
    return result


def _short(path: str) -> str:
    """The last component of a path without its line number, which a summary would contain at least."""
    path = re.sub(r"(?::\d+)+$", "", path).rstrip("/")
    steps = re.split(r"[/\\]", path)
    return "/".join(steps[-2:]) if steps[-1].isalpha() else steps[-1]


_COUNTED = re.compile(r"(\d+) (\w{4})")


def _has(low: str, fact: KeyFact) -> bool:
    """Whether a lower-case text names the value, as a whole word; of a dotted name the last part counts,
    and `1 failed` is found in "1 test failed"."""
    value = fact.value.lower()
    if _whole(low, value):
        return True
    counted = _COUNTED.match(value) if fact.kind is FactKind.TEST else None
    if counted:
        return re.search(rf"\b{counted.group(1)}(?: \w+){{0,2}} {counted.group(2)}", low) is not None
    tail = value.rsplit(".", 1)[-1]
    return "." in value and len(tail) >= 5 and tail not in ("py", "txt", "json") and _whole(low, tail)


def _whole(low: str, value: str) -> bool:
    at = low.find(value)
    while at >= 0:
        end = at + len(value)
        starts_word = at == 0 or not (low[at - 1].isalnum() or low[at - 1] == "_") or not value[0].isalnum()
        ends_word = end == len(low) or not (low[end].isalnum() or low[end] == "_") or not value[-1].isalnum()
        if starts_word and ends_word:
            return True
        at = low.find(value, at + 1)
    return False


def _invented(summary: str, sources: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of names and numbers in the summary, and those that occur in no source."""
    names: dict[str, None] = {}
    for mention in identifiers(summary):
        if mention.kind != "number" or len(mention.text.strip("+-%")) > 1:
            names.setdefault(mention.text.rstrip(":/"))
    invented = tuple(name for name in names if not _known(name.lower(), sources))
    return len(names), invented


def _known(name: str, sources: str) -> bool:
    """Whether the sources have the name, its last component or, for `a.b`, each of its parts."""
    if name in sources or name.strip("+-%./") in sources:
        return True
    if name[0].isdigit():
        digits = re.match(r"[\d.]+", name.replace("_", "").replace(",", ""))
        return digits is not None and digits.group() in sources
    parts = [part for part in re.split(r"[/\\.:]+|::|[-+@]", name) if len(part) > 1]
    return bool(parts) and all(part in sources for part in parts)


def _read(piece: Piece, max_chars: int) -> list[str]:
    """Return the text of a piece, sampled if it is longer than `max_chars`."""
    return [piece.text[start:end] for start, end in sample(piece.text, max(4000, max_chars))]


def complete(summary: str, missing: Sequence[KeyFact], pieces: Sequence[Piece], tokens: int, count: Callable[[str], int]) -> str:
    """Return the summary, followed by the verbatim lines of the missing facts, within `tokens`.

    Each line names its page (`p17: ...`) and occurs once; a long line is cut around the fact. The summary alone if it
    leaves no room; "" if it alone is over the budget.
    """
    if count(summary) > tokens:
        return ""
    texts = {piece.page: piece.text for piece in pieces}
    body = summary.rstrip()
    added = ""
    for fact in missing:
        if _whole(added.lower(), fact.value.lower()) or fact.page not in texts:
            continue
        line = _quote(texts[fact.page], fact)
        head = "" if added else "\n\nVerbatim:\n"
        more = f"{added}{head}{'p' if fact.page > 0 else 'f'}{abs(fact.page)}: {line}\n"
        if count(body + more) <= tokens:
            added = more
    return body + added if added else summary


def _quote(text: str, fact: KeyFact) -> str:
    """The fact's line, stripped; of a long one the part around the fact."""
    line = text[fact.span[0] : fact.span[1]].strip()
    if len(line) <= MAX_QUOTE_CHARS:
        return line
    at = max(0, line.lower().find(fact.value.lower()) - MAX_QUOTE_CHARS // 2)
    mark = OMISSION.strip()
    return (mark if at else "") + line[at : at + MAX_QUOTE_CHARS] + (mark if at + MAX_QUOTE_CHARS < len(line) else "")
