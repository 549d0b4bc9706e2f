"""How often a search that may abstain withholds an answer, and how often it withholds what is none.

Each question of a conversation is asked of its own, of the next conversation, in which nobody spoke of it, and of its own with
other names in place of those of the people who speak: the same question about another person, a near miss. Beside them stand
those that ask of one speaker what the other one said (LoCoMo's category "adversarial"). Of the first only those count for which a
message that answers it is among what was found. Confidence was fitted on every other conversation, from the first on; figures are
told of both halves. One token is four characters.
"""

from __future__ import annotations

import re
from pathlib import Path

from figures import Row, emit, parser
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.page import parse_address
from kilburn.search.choice import vectors_for
from kilburn.testing import FakeClock
from kilburn_lab.evals.corpora import Answers, Corpus, answers_of, corpora, synthetic
from kilburn_lab.evals.recall import BEGINNING, DAY, conversation

OTHERS = ("Oscar", "Ingrid", "Ravi", "Bridget", "Yuki", "Farah", "Lucia", "Hamish")
KINDS = ("own", "another conversation", "another person", "another speaker")


def measure(corpus: Corpus, other: Corpus, answers: Answers, tokens: int, embedder: str) -> dict[str, list[bool]]:
    """Of each kind, whether each question was withheld."""
    backend = Sqlite(":memory:")
    clock = FakeClock(BEGINNING, tick=0.0)
    found: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    people = sorted({said.speaker for said in corpus.docs})
    instead = dict(zip(people, (name for name in OTHERS if name not in people), strict=False))
    with Store(backend, Budget(1 << 40), tokenizer="chars/4", clock=clock, vectors=vectors_for(backend, embedder)) as store:
        ids = conversation(store, corpus.docs)
        if store.vectors is not None:
            store.vectors.catch_up()  # type: ignore[attr-defined]
        clock.now = max(time for _, time in ids.values()) + DAY
        for asked in corpus.queries:
            gold, category = answers[corpus.name, asked.id]
            if category == "adversarial":
                found["another speaker"].append(not store.search(asked.text, tokens, None, abstain=True))
                continue
            hits = store.search(asked.text, tokens, None, abstain=True)
            shown = {ids[hit.session, parse_address(hit.address)[0]][0] for hit in (*hits, *hits.withheld)}
            if gold & shown:
                found["own"].append(not hits)
            renamed = asked.text
            for name, new in instead.items():
                renamed = re.sub(rf"\b{re.escape(name)}\b", new, renamed)
            if renamed != asked.text:
                found["another person"].append(not store.search(renamed, tokens, None, abstain=True))
        for asked in other.queries:
            if answers[other.name, asked.id][1] != "adversarial":
                found["another conversation"].append(not store.search(asked.text, tokens, None, abstain=True))
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--data", type=Path, help="conversations, as `kilburn lab recall` reads them; made-up ones where none")
    options.add_argument("--tokens", type=int, default=2000, help="of what is found")
    options.add_argument("--embedder", action="append", help="minilm, hashing, none, ...; none where left out")
    options.add_argument("--conversations", type=int, help="no more than so many")
    asked = options.parse_args()
    if asked.data is None:
        some, answers = synthetic(0)
    else:
        some, answers = list(corpora(asked.data)), answers_of(asked.data)
    some = some[: asked.conversations]
    rows: list[Row] = []
    for embedder in asked.embedder or ["none"]:
        halves: dict[str, dict[str, list[bool]]] = {half: {kind: [] for kind in KINDS} for half in ("tune", "report")}
        for at, corpus in enumerate(some):
            for kind, withheld in measure(corpus, some[(at + 1) % len(some)], answers, asked.tokens, embedder).items():
                halves["report" if at % 2 else "tune"][kind] += withheld
        for half, kinds in halves.items():
            own = sum(kinds["own"]) / max(1, len(kinds["own"]))
            rows += [
                {
                    "vectors": embedder, "half": half, "asked of": kind, "questions": len(withheld), "withheld": sum(withheld),
                    "share": (share := sum(withheld) / max(1, len(withheld))), "x": share / own if own else float(kind == "own"),
                }
                for kind, withheld in kinds.items()
            ]  # fmt: skip
    emit("abstaining", rows, asked.json, f"{len(some)} conversations, {asked.tokens} tokens an answer")


if __name__ == "__main__":
    main()
