"""What was just asked needs of what the window does not show: passages to bring, or none.

The search of the session finds and ranks them, and says whether any is likely to be an answer; here it is decided what the
search is asked for, how much of what it found fits, and when a copy leaves again. Nothing is brought twice: a passage that the
window shows already is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import dropwhile, islice, pairwise, takewhile

from kilburn.effect import Answer, Effect, Find, Hit
from kilburn.message import Kind, Role
from kilburn.move import Bring, Evict, Move
from kilburn.page import Page, Parts, Span
from kilburn.policy import View
from kilburn.prices import Prices
from kilburn.remembered import remembered
from kilburn.retrieval import STOP
from kilburn.selection.excerpts import focus_texts, mean_message_tokens, shown_texts
from kilburn.selection.identifiers import identifiers
from kilburn.selection.orders import MAX_SENTENCE, own_sentences
from kilburn.selection.passages import comparable_lines, count_words, word_runs
from kilburn.selection.selection import HEADING, MARK, PagePassage, joined, new_share, page_candidates
from kilburn.selection.signs import Sign, classify_line, sign_of_prose

HITS = 100
"""Maximum number of passages that the search returns."""

QUERY, HALF = 1000, 0.5
"""Maximum characters of the query, and the weight of a long request and of messages before a short one."""

BRIEF, SHORT = 12, 80
"""Words of a message that is taken as a question without its mark, and of an agent's plan that is searched for by its words; of
one that a person typed, at most."""

QUESTION_SHARE, LESS_SHARE = 0.4, 0.2
"""Minimum share of the best score for a passage after a question, and the reduction of this share in a large window."""

OTHER_SHARE, MIN_CONFIDENCE, MIN_WORDS = 0.8, 0.8, 3
"""The same where nobody does; how likely an answer must be then, and words that must be searched for."""

SMALL = 4000
"""Tokens of a small window. A window of twice as many is large."""

WHOLE, GRAIN, MATCH = 800, 300, 0.5
"""Characters of a page that is brought whole; of a passage of a longer one, at most; share of what the
asked words of the best one beside it are worth that it needs, each word by how few passages have it."""

NEW = 0.5
"""Minimum share of a passage that the window does not show already."""

NAMED_TOKENS, MAX_NAMES, MAX_WORDS, NAME_HITS = 300, 6, 12, 20
"""While an agent works: maximum tokens of passages that explain names in its newest step; maximum number of such names (with
more, the agent writes new code and none is searched for); maximum number of other words to search for; maximum number of hits."""

REMINDER_TOKENS, USER_HITS, RARE, CALL_WORDS = 120, 12, 2, 40
"""While an agent works: maximum tokens of the user's sentences that concern its newest step; maximum number of passages to search
for them; maximum number of sentences with a word that suffices alone; maximum words of a call or plan that is used whole."""

STEP_CHARS, MIN_NAME_CHARS = 4000, 4
"""Characters at the end of a message that are scanned for names; minimum characters of a name."""

NAME_KINDS = ("call", "dotted", "error", "name")
"""Kinds of identifiers that have a meaning in an older output; a path has none."""

ERRORS = (Sign.FRAME, Sign.ERROR, Sign.FAILED)
"""Kinds of lines of a tool's output that are scanned for names."""

RECENT_PAGES = 12
"""Number of the newest pages that show whether the agent continues after its own messages."""

FIRST_PAGES = 8
"""Maximum id of a page that can be the user's first text: the pages before it are the system's."""

MIN_OVERLAP = 0.5
"""Minimum share of a copy, by characters, that must still be relevant for the copy to stay."""

MARKS = ("?", "？", "؟")
"""The ends of a question."""

_CODE = re.compile(r"(?<=`)\w+(?=`)|\w*[a-z]_?[A-Z_]\w*|\w+_\w+")
_DEFINES = re.compile(r"\b(?:class|def|enum|fn|func|function|interface|struct|trait|type)[ \t]+(\w+)")
"""A name of a program, and a line that defines one."""

_ESCAPE = re.compile(r"\\[nrt]|\"\w+\"\s*:")
"""White space in the arguments of a call, and their keys."""

_QUOTED = re.compile(r"""\\"([^"\\]{4,80})\\"|'([^'\\]{4,80})'""")
"""Text that the arguments of a call quote, such as the pattern of a search."""

_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？؟])|\n")


def largeness(capacity: int) -> float:
    """Return 0 for a window of 4,000 tokens or less, 1 for a window of 8,000 or more, with linear interpolation."""
    return min(1.0, max(0.0, capacity / SMALL - 1))


def removable_copies(view: View) -> list[Page]:
    """Return the copies that may leave."""
    return [view.page(number) for number in sorted(view.copies) if number not in view.pins]


def copy_moves(leaving: Sequence[Page], passages: Sequence[PagePassage]) -> list[Move]:
    """Return the moves that evict copies and bring passages."""
    moves: list[Move] = [Evict(tuple([page.id for page in leaving]), why="not asked for any more")] if leaving else []
    parts = joined(passages)
    return [*moves, Bring(parts, why=f"{described(parts)} for what was asked")] if parts else moves


def described(parts: Parts) -> str:
    """Return the number of pages that passages are from, in words."""
    return f"passages of {len(parts)} page{'' if len(parts) == 1 else 's'}"


def unshown(passages: Sequence[PagePassage], copies: Sequence[Page]) -> list[PagePassage]:
    """Return the passages that these copies do not show."""
    return [passage for passage in passages if not any(_has(page.parts, passage) for page in copies)]


def fitting(view: View, passages: Sequence[PagePassage], room: int) -> list[PagePassage]:
    """Return the first of these passages that fit into `room` tokens as one copy."""
    room -= view.count(HEADING)
    fit: list[PagePassage] = []
    pages: set[int] = set()
    for passage in passages:
        room -= _cost(view, passage, pages)
        if room < 0:
            break
        pages.add(passage.page)
        fit.append(passage)
    return fit


def _cost(view: View, passage: PagePassage, pages: Set[int]) -> int:
    """Return the tokens of a passage in a copy of these pages."""
    return (
        view.count(passage.text[passage.passage.start : passage.passage.end])
        + 3
        + (0 if passage.page in pages else view.count(MARK) + 4)
    )


def pays(tokens: int, behind: int, prompts: float, prices: Prices) -> bool:
    """Whether it pays to take a page out of the prompt. To keep it costs a cached read for each prompt. To take it out costs that
    all that stands behind it is written to the cache again, in place of a cached read.

    Args:
        tokens: of the page.
        behind: tokens behind it that the provider has in its cache.
        prompts: in which it would stand otherwise.
    """
    return tokens * prompts * prices.cached > behind * max(0.0, prices.written - prices.cached)


def leaves(view: View, copy: Page, passages: Sequence[PagePassage], prices: Prices) -> bool:
    """Return whether a copy is no longer relevant and its eviction pays now; the next edit in front, when the window is full,
    would evict it in any case. Passages for the user's request are relevant until the user's next message."""
    overlap = _overlap(copy.parts, passages)
    if overlap >= MIN_OVERLAP or (overlap and not is_typed(view)):
        return False
    if _is_of_task(view, copy):
        return False
    prompts = max(0, view.budget.capacity - view.use) / mean_message_tokens(view) / 2
    return pays(copy.tokens, cached_behind(view, copy), prompts, prices)


def _is_of_task(view: View, copy: Page) -> bool:
    """Return whether a copy precedes the user's latest message, on which the agent works."""
    behind = takewhile(lambda page: page.id != copy.id, reversed(view.pages))
    return any(page.id == view.task_page and not view.is_latest(page) for page in behind)


def cached_behind(view: View, copy: Page) -> int:
    """Return the tokens behind a copy that the provider has in its cache. No prompt contained the newest message or the
    assistant's message before it."""
    behind = takewhile(lambda page: page.id != copy.id, reversed(view.pages))
    cached = dropwhile(lambda page: page.role is Role.ASSISTANT, dropwhile(view.is_latest, behind))
    return sum([page.tokens for page in cached])


def passages_asked(
    view: View, room: int, *, staying: Sequence[Page] | None = None, excerpt: Parts = ()
) -> Generator[Effect, Answer, list[PagePassage]]:
    """The passages that the search finds for what was just asked, or for what the agent is working on, best first; none where
    it finds no likely answer. What copies show may be among them.

    Args:
        room: tokens that they may take as one copy.
        staying: the pages that stay in the window, if others leave with the same plan; None if all stay.
        excerpt: what an excerpt of that plan keeps.
    """
    stays = view.pages if staying is None else staying
    query, is_question = build_query(view)
    chosen: list[PagePassage] = []
    if all(page.role is not Role.USER for page in view.latest()):
        chosen = yield from _sentences_about(view, min(room, REMINDER_TOKENS), stays, excerpt)
        room -= sum([_cost(view, passage, set()) for passage in chosen])
        explaining = yield from _passages_named(view, min(room, NAMED_TOKENS), stays, excerpt)
        if explaining is not None or len(query.split()) > BRIEF:
            return [*chosen, *(explaining or [])]
    room -= view.count(HEADING)
    words = count_words(query).keys() - STOP
    if not words or (not is_question and len(words) < MIN_WORDS) or room <= 2 * view.handle:
        return chosen
    shown_ids = frozenset([page.id for page in stays if page.id > 0])
    answer = yield Find(query=query, limit=HITS, tokens=room, abstain=True, shown=shown_ids, by_words=not is_question)
    if not answer.hits or (not is_question and answer.confidence < MIN_CONFIDENCE):
        return chosen
    texts = _texts_beside(view, [], stays, excerpt)
    lines: set[str] = set().union(*map(comparable_lines, texts))
    min_score = answer.hits[0].score * (
        QUESTION_SHARE - LESS_SHARE * largeness(view.budget.capacity) if is_question else OTHER_SHARE
    )
    hits = takewhile(lambda hit: hit.score >= min_score, answer.hits)
    pages = {passage.page for passage in chosen}
    names = words & {name.lower() for name in _CODE.findall(query)}
    for passage in _passages(view, hits, words, names, 2 * room if is_question else WHOLE):
        cost = _cost(view, passage, pages)
        if cost <= room and new_share(passage.passage, lines) >= NEW:
            room -= cost
            pages.add(passage.page)
            lines.update(passage.passage.lines)
            chosen.append(passage)
    return chosen


def _sentences_about(
    view: View, room: int, staying: Sequence[Page], excerpt: Parts
) -> Generator[Effect, Answer, list[PagePassage]]:
    """Search for what the user said about the paths and names of the agent's newest step: the sentences that share the most of
    its rare words. An order of an unusual form is thus shown when it matters.

    Args:
        room: tokens that the sentences may take as one copy.
        staying: the pages that stay in the window.
        excerpt: what an excerpt of the same plan keeps.
    """
    step = _newest_step(view)
    names, words = _subjects_of(view, step)
    if not words or room <= 2 * view.handle or _speaks_first(view):
        return []
    shown_ids = frozenset([page.id for page in staying if page.id > 0])
    query, tokens = " ".join(sorted(words)), 4 * REMINDER_TOKENS
    answer = yield Find(query=query, limit=USER_HITS, tokens=tokens, shown=shown_ids, by_words=True, by_user=True)
    texts = _texts_beside(view, step, staying, excerpt)
    sentences: list[tuple[PagePassage, set[str]]] = []
    for page in sorted({hit.page for hit in answer.hits}, reverse=True):
        text = view.text(page)
        for start, stop, _ in own_sentences(text):
            sentence = text[start:stop]
            shared = words & count_words(sentence).keys()
            if shared and sentence[-1] not in MARKS and not any(sentence in other for other in texts):
                passages = page_candidates(text, page, view.page(page).message, Role.USER, MAX_SENTENCE, (start, stop))
                sentences += [(passage, shared) for passage in passages]
    times = Counter(word for passage, shared in sentences for word in shared)
    rare = {word for word in names if times[word] <= RARE}
    sentences = [(passage, shared) for passage, shared in sentences if len(shared) > 1 or shared & rare]
    sentences.sort(key=lambda sentence: -sum([1 / times[word] for word in sentence[1]]))
    return fitting(view, [passage for passage, _ in sentences], room)


def _speaks_first(view: View) -> bool:
    """Return whether the request is the user's first text, as in most runs of an agent, so that no older one can be searched."""
    return 0 < view.task_page <= FIRST_PAGES and all(view.page(page).role is not Role.USER for page in range(1, view.task_page))


def _subjects_of(view: View, step: Sequence[Page]) -> tuple[set[str], set[str]]:
    """Return the words of what the agent's newest step acts on (the names and paths in it, and all of a brief call), and these
    with all words of a brief plan."""
    names, words = set[str](), set[str]()
    for page in step:
        if page.role is Role.ASSISTANT:
            text = _ESCAPE.sub(" ", view.text(page.id)[-STEP_CHARS:])
            names.update(count_words(" ".join([mention.text for mention in identifiers(text) if mention.kind != "number"])))
            if len(text.split()) <= CALL_WORDS:
                (names if page.kind is Kind.CALL else words).update(count_words(text))
    names = {word for word in names if len(word) >= MIN_NAME_CHARS} - STOP
    return names, names | {word for word in words if len(word) >= MIN_NAME_CHARS} - STOP


def _passages_named(
    view: View, room: int, staying: Sequence[Page], excerpt: Parts
) -> Generator[Effect, Answer, list[PagePassage] | None]:
    """Search for the names in the agent's newest step. Each name gets one passage: its definition or, if no other text in the
    window contains the name, a passage that contains it. A plain word that a call quotes or an error contains gets the passages
    that contain it, if they are few. Return None if there is no such name or word.

    Args:
        room: maximum tokens of the passages as one copy.
        staying: the pages that stay in the window.
        excerpt: what an excerpt of the same plan keeps.
    """
    step = _newest_step(view)
    names, words = _names_in(view, step)
    room -= view.count(HEADING)
    if not (names or words) or room <= 2 * view.handle:
        return None
    texts = _texts_beside(view, step, staying, excerpt)
    hidden = names.difference(*map(word_runs, texts))
    missing = hidden | names.difference(*map(_defined_names, texts))
    if len(words) > MAX_WORDS:
        words = set()
    if not (missing or words) or len(missing) > MAX_NAMES:
        return None
    shown_ids = frozenset([page.id for page in staying if page.id > 0])
    query_words = missing | words
    answer = yield Find(query=" ".join(sorted(query_words)), limit=NAME_HITS, tokens=4 * room, shown=shown_ids, by_words=True)
    candidates: list[tuple[PagePassage, frozenset[str]]] = []
    for passage in _passages(view, answer.hits, query_words, missing, WHOLE):
        content = passage.text[passage.passage.start : passage.passage.end]
        if not any(content in text for text in texts):
            candidates.append((passage, _defined_names(content)))
    times = Counter(word for passage, _ in candidates for word in words & passage.passage.words.keys())
    rare = {word for word in words if times[word] <= RARE}
    candidates.sort(key=lambda candidate: candidate[1].isdisjoint(missing))
    chosen: list[PagePassage] = []
    pages: set[int] = set()
    for passage, definitions in candidates:
        explained = missing & passage.passage.words.keys() & (hidden | definitions)
        cost = _cost(view, passage, pages)
        shared = rare & passage.passage.words.keys()
        if (explained or shared) and cost <= room:
            rare -= set() if explained else shared
            room -= cost
            pages.add(passage.page)
            chosen.append(passage)
            missing -= explained
    return chosen


def _texts_beside(view: View, step: Sequence[Page], staying: Sequence[Page], excerpt: Parts) -> list[str]:
    """Return the texts of the prompt except a step and the copies: those of the pages that stay and of an excerpt."""
    new = {page.id for page in step} | view.copies
    texts = shown_texts(view, (page for page in reversed(staying) if page.id not in new))
    return texts + [view.text(number)[slice(*span)] for number, spans in excerpt for span in spans]


def _newest_step(view: View) -> list[Page]:
    """Return the pages of the agent's last message, calls and results, newest first."""
    step: list[Page] = []
    for page in reversed(view.pages):
        if page.id in view.copies:
            continue
        if page.id <= 0 or (page.role is not Role.ASSISTANT and step and step[-1].role is Role.ASSISTANT):
            break
        step.append(page)
    return step


def _names_in(view: View, step: Sequence[Page]) -> tuple[set[str], set[str]]:
    """Return the identifiers that the agent wrote and those in the resulting errors, in lower case; and the other words of these
    errors, of its calls' quotations, and of its remaining tasks."""
    names, words = set[str](), set[str]()
    for page in step:
        text = view.text(page.id)[-STEP_CHARS:]
        if page.role is not Role.ASSISTANT:
            signs = [(line, classify_line(line)) for line in text.split("\n")]
            text = "\n".join([line for line, sign in signs if sign in ERRORS])
            subjects = [line for line, sign in signs if sign is Sign.ERROR]
        elif page.kind is Kind.CALL:
            subjects = [double or single for double, single in _QUOTED.findall(text)]
        else:
            subjects = [line for line in text.split("\n") if sign_of_prose(line) is Sign.TASK]
        words.update(word_runs("\n".join(subjects)))
        mentions = [mention.text for mention in identifiers(_ESCAPE.sub(" ", text)) if mention.kind in NAME_KINDS]
        names.update([re.split(r"[.:]+", mention)[-1].lower() for mention in mentions])
    words = {word for word in words if len(word) > MIN_NAME_CHARS and word.isalpha()} - STOP
    names = {name for name in names if len(name) >= MIN_NAME_CHARS}
    return names, words - names


@remembered(lambda names: 90 * len(names))
def _defined_names(text: str) -> frozenset[str]:
    """Return the names that a text defines, in lower case."""
    return frozenset([name.lower() for name in _DEFINES.findall(text)])


def _passages(view: View, hits: Iterable[Hit], words: Set[str], names: Set[str], max_chars: int) -> Iterator[PagePassage]:
    """Yield the passages of hits: a short page whole, and of a longer one what has the words of the query, the rare ones above
    all, and what defines one of the names."""
    groups: list[Sequence[PagePassage]] = []
    for hit in hits:
        page = view.page(hit.page)
        if page.kind is not Kind.FOLD and not page.is_atomic:
            text = view.text(page.id)
            grain = len(text) if len(text) <= (max_chars if page.kind is Kind.TEXT else WHOLE) else GRAIN
            cut = partial(page_candidates, text, page.id, page.message, str(page.role), grain)
            spans = [None] if grain > GRAIN else [*_definitions(text, names), hit.span]
            groups += [cut(span) for span in spans]
    times = Counter(word for passages in groups for passage in passages for word in words & passage.passage.words.keys())
    for passages in groups:
        worth = [sum([1 / times[word] for word in words & passage.passage.words.keys()]) for passage in passages]
        min_worth = MATCH * max(worth, default=0.0)
        yield from (passage for passage, value in zip(passages, worth, strict=True) if value >= min_worth)


def _definitions(text: str, names: Set[str]) -> Iterator[Span]:
    """Return the lines of a text that define one of these names."""
    for match in _DEFINES.finditer(text) if names else ():
        if match[1].lower() in names:
            yield text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end()) % (len(text) + 1)


def build_query(view: View) -> tuple[str, bool]:
    """Return the text to search for, and whether the user just asked it."""
    if is_typed(view):
        text = view.task[-QUERY:]
        questions = extract_questions(text)
        return " ".join(questions) or text, bool(questions) or len(text.split()) <= BRIEF
    return "\n".join([text[-QUERY:] for text, weight in focus_texts(view) if weight >= HALF]), False


def is_typed(view: View) -> bool:
    """Return whether a person typed the newest message, as opposed to a tool's result under the user's name."""
    return any(page.id == view.task_page for page in view.latest()) and (is_chat(view) or _asks(view.task))


def is_chat(view: View) -> bool:
    """Return whether this is a conversation: the user's latest message is short or a question, and no agent works on it now."""
    short = len(view.task.split()) <= SHORT or _asks(view.task)
    return short and all(page.kind is Kind.TEXT for page in view.latest()) and not _goes_on(view)


def extract_questions(text: str) -> list[str]:
    """Return the sentences of a text that end with a question mark."""
    return [sentence for sentence in _ENDS.split(text) if sentence.rstrip().endswith(MARKS)]


def _asks(text: str) -> bool:
    return text.rstrip().endswith(MARKS)


def is_due(view: View) -> bool:
    """Return whether a prompt follows the newest message. After a message of the assistant, this holds only if the agent recently
    continued after its own message."""
    by_assistant = any(page.role is Role.ASSISTANT for page in view.latest())
    by_user = any(page.role is Role.USER for page in view.latest())
    return _goes_on(view) if by_assistant else not (by_user and _goes_on(view)) or is_typed(view)


def _goes_on(view: View) -> bool:
    """Return whether the agent recently continued after its own message, so that the next prompt may follow one."""
    pages = [page for page in islice(reversed(view.pages), RECENT_PAGES) if page.id not in view.copies]
    return any(
        page.role is following.role is Role.ASSISTANT and page.message != following.message for page, following in pairwise(pages)
    )


def _has(parts: Parts, passage: PagePassage) -> bool:
    """Return whether these spans show a passage."""
    return any(
        page == passage.page and any(start <= passage.passage.start and passage.passage.end <= stop for start, stop in spans)
        for page, spans in parts
    )


def _overlap(parts: Parts, passages: Sequence[PagePassage]) -> float:
    """Return the relevant share of these spans, by characters."""
    whole = sum([stop - start for _, spans in parts for start, stop in spans])
    return sum([passage.passage.end - passage.passage.start for passage in passages if _has(parts, passage)]) / max(1, whole)
