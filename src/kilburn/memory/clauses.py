"""The plain statements of a message: clauses in which somebody says something in their own name.

Questions, hypotheses, quotations, code, reported speech and pasted texts are left out. The patterns are for English; a text in
another language yields at most a few clauses, in which no statement is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TEXT_CHARS = 20_000
"""Characters of a text that is read whole. Of a longer one, only the first and last `EDGE_CHARS` are read: most was pasted."""
EDGE_CHARS = 2_000

MAX_SENTENCE_CHARS = 800
"""Characters of a sentence; longer ones are skipped."""

HOLE = "\x1a"
"""Placeholder of a removed quotation."""

_BLOCKS = re.compile(
    r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|<([A-Za-z][\w-]{0,40})\b[^>]{0,200}>.*?(?:</\1>|\Z)|\[[^\]\n]{0,300}\]", re.DOTALL
)
_BLANK = re.compile(r"\n\s*\n")
"""Blank lines. They are joined first, because the two patterns below would take quadratic time on many of them."""
_LINES = re.compile(r"^(?:>|\t| {4}|\s*[|#$%]).*$", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+", re.MULTILINE)
_QUOTED = re.compile(r'"[^"\n]{0,2000}"|`[^`\n]{0,300}`')
_ODD = re.compile(r"[^\w\s!-~–—…€£°\x1a]+")
_SENTENCE = re.compile(
    r"(?<=[.!?…])(?<!\b[A-Z]\.)(?<!\b(?:Dr|Mr|Ms|St|vs)\.)(?<!\b(?:Mrs|e\.g|i\.e|a\.m|p\.m|etc)\.)[\"')]*\s+|\n+"
)

_TASK = re.compile(
    r"^(?:from|to|cc|subject|sent): \S|(?<!\bi )\b(?:said|says|reads?|wrote|writes|texted|sent|posted|replied|answered|told)\b"
    r"[^:]{0,60}:(?!//|\d)|(?<!\bi )\b(?:rewrite|rephrase|reword|translate|proofread|paraphrase|edit|correct|revise|improve"
    r"|polish|summari[sz]e|review|draft|compose|continue|complete|check|analy[sz]e|classify|say|repeat|quote|print|output|type)\b[^:]{0,200}:(?!//|\d)",
    re.IGNORECASE,
)
_FICTION = re.compile(
    r"(?:ok(?:ay)?,? |now,? |please,? |let's |can you |could you )*(?:pretend|imagine|role-?play|act as|suppose|assume"
    r"|hypothetically|you are an?|in this (?:story|scenario|game)|(?:write|draft|compose|continue)\b[^.?!]*\b(?:stor(?:y|ies)"
    r"|tales?|novels?|scenes?|scripts?|dialogues?|plays?|fiction|character|speech|lines?|letter from|as if)|once upon a time)\b",
    re.IGNORECASE,
)
_WRITING = re.compile(
    r"(?:ok(?:ay)?,? |now,? |please,? |let's |can you |could you )*(?:help me )?(?:write|draft|compose)\b", re.IGNORECASE
)
"""A request to write something is no statement. What follows may be one."""
_ABOUT_ME = re.compile(r"\b(?:about me|myself|remember|note|mind|know|rules?|instructions?|preferences?|facts)\b", re.IGNORECASE)
_QUESTION = re.compile(
    r"(?:^|[,;:–—-]\s*|\s(?=(?:and|so|but|then|or)\s))(?:(?:and|so|but|then|or|well|hmm|also|now|just|i'm|i was)\s+)*(?:can"
    r"|could|would|will|should|shall|do|does|did|is|are|am|was|were|have|has|may|any|what(?:'s)?|how|which|who|whom|where|when"
    r"|why|wonder(?:ing)?|right|ok|okay|isn't|don't|aren't|doesn't|didn't|won't|haven't|remember)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_REQUEST = re.compile(
    r"[,;–—-]?\s*(?:\b(?:and|so|but)\s+)?\b(?:(?:can|could|would|will) you|(?:how|what|where) (?:can|could|should|do|would)"
    r" (?:i|we|you)|(?:i'm|i was|i am) (?:just )?wondering|i wonder|please (?:help|tell|give|show|explain)|help me)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_CUT = re.compile(
    r"\s*;\s*|\s+[–—]\s*|\s+-+\s+|,\s+(?=(?:and|but|so|because|since|which|who|whose|where|although|though|while|whereas|as"
    r"|then|or|if|unless|when|considering|given|especially|with|thanks|plus|in case|can|could)\b)|\s+(?=(?:and|but|so|because"
    r"|although|though|while|whereas|if|unless|when|where|since|until|till|before|after)\s+(?:i|i'm|i've|i'll|i'd|my|we|we're"
    r"|we've|our|you|he|she|they|it|it's|the|this|that|there|now)\b)|,\s+(?=(?:i|i'm|i've|i'd|i'll|my|we|it|it's|you|you're|he"
    r"|she|they|that's|this|the)\b)",
    re.IGNORECASE,
)
_PREFIX = re.compile(
    r"(?:(?:and|but|so|because|cause|since|as|plus|also|well|yes|yeah|yep|yup|ok(?:ay)?|oh|ah|hi|hello|hey|thanks|thank you|btw"
    r"|by the way|fyi|for (?:context|the record|reference|future reference|your information)|just so you know|in fact|honestly"
    r"|personally|currently|right now|now|nowadays|these days|lately|recently|although|though|while|whereas|especially"
    r"|considering|given|that|first(?:ly)?|second(?:ly)?|anyways?|besides|sure|great|cool|wow|hmm|haha|lol|today|please|just"
    r"|(?P<fix>actually|no|nope|sorry|wait|correction|oops|my mistake|my bad|i was wrong|scratch that|i meant to say|i"
    r" misspoke|let me correct (?:that|myself)))(?=[\s,.:!–—-]|\Z)(?:\s+[A-Z][a-z]+(?=[,!]))?[,.:!–—-]*\s*)+",
    re.IGNORECASE,
)
_UNREAL = re.compile(
    r"\b(?:if|would|could|might|wish|maybe|perhaps|probably|hypothetically|pretend|imagine|suppose|kidding|joking|unless"
    r"|whether|used to|as though|should have|not sure|don't know|don't think|doubt|instead of saying|for example|e\.g)\b|\x1a",
    re.IGNORECASE,
)
_OPENS_UNREAL = re.compile(
    r"(?:(?:and|but|so|or|even|only|well|then)\s+)*(?:if|suppose|supposing|imagine|pretend|assume|assuming|say|let's say|unless"
    r"|what if|in case|had i|were i|once|until|till|whether|for (?:example|instance)|as if|yeah,? right|oh,? (?:great|joy)"
    r"|(?:ha)+,? (?:sure|right|yeah)|sure,? and)\b",
    re.IGNORECASE,
)
_REPORTS = re.compile(
    r"\b(?:said|says?|saying|told|tells?|asked|asks|wrote|writes|thinks?|thought|believes?|claims?|claimed|replied|answered"
    r"|goes|was like|is like|heard|quoted?|quoth|texted|mentioned|insists?|reads?)(?:\s+(?:me|us|him|her|them"
    r"|that))*\s*[,:]?\s*\Z",
    re.IGNORECASE,
)
_SUBORDINATE = re.compile(r"(?:when|where|before|after|until|till|which|who|whose|with)\b", re.IGNORECASE)
_MARKS = " ,.:!-–—"


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause without its introduction ("and", "by the way").

    Args:
        fix: whether it is introduced as a correction ("no,").
        rest: the text from here to the end of the sentence, without questions.
    """

    text: str
    fix: bool
    rest: str


def clauses(text: str) -> Iterator[Clause]:
    """Yield the clauses that somebody says in their own name, in order."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:EDGE_CHARS]}\n\n{text[-EDGE_CHARS:]}"
    text = text.translate(_PLAIN)
    text = _BULLET.sub("", _LINES.sub("", _BLANK.sub("\n\n", _BLOCKS.sub("\n", text))))
    text = _ODD.sub(" ", _QUOTED.sub(lambda match: HOLE if match[0].count(" ") > 1 else match[0], text))
    for sentence in _SENTENCE.split(text):
        sentence = " ".join(sentence.split())
        if not sentence or len(sentence) > MAX_SENTENCE_CHARS:
            continue
        if _FICTION.match(sentence) or _TASK.search(sentence):
            return  # the rest is the text to work on
        if _WRITING.match(sentence):
            continue
        yield from _split_sentence(sentence)
        if sentence.endswith(":") and not _ABOUT_ME.search(sentence):
            return


_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\x1a": " ", "\N{NO-BREAK SPACE}": " "})


def unasked(sentence: str) -> str:
    """Return a sentence without what it asks: "I'm vegetarian, can you help?" is "I'm vegetarian"; "" of a mere question."""
    if sentence.endswith("?"):
        rest = _QUESTION.sub("", sentence)
        sentence = "" if rest == sentence else rest
    return _REQUEST.sub("", sentence).strip(_MARKS)


def _split_sentence(sentence: str) -> Iterator[Clause]:
    sentence = unasked(sentence)
    previous = ""
    fix = False
    at = 0
    for cut in [*_CUT.finditer(sentence), None]:
        start, piece = at, sentence[at : cut.start() if cut else None]
        at = cut.end() if cut else at
        if _OPENS_UNREAL.match(piece) or _REPORTS.search(previous):
            return
        previous = piece
        match = _PREFIX.match(piece)
        body = piece[match.end() :] if match else piece
        fix = fix or bool(match and match["fix"])
        if body.strip(_MARKS) and not _UNREAL.search(body) and not _SUBORDINATE.match(body):
            rest = sentence[start + len(piece) - len(body) :]
            yield Clause(body.strip(_MARKS), fix, rest.strip(_MARKS))
        fix = fix and not body.strip(_MARKS)
