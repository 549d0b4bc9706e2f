"""Change, correct, contradict, take back and forget facts, then ask for the facts that are true now, and at an earlier time.

Examples:

    kilburn lab change

    kilburn lab change --mode talk --extractor rules
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kilburn.file import check_target, write_file
from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.change import MODES, ChangeReport, evaluate
from kilburn_lab.evals.following import EXTRACTORS
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.streams import FAMILIES


def _measured(*, out: Path | None = None, force: bool = False, **options: Any) -> ChangeReport:
    if out is not None:
        check_target(out, force=force)
    report = evaluate(**options)
    if out is not None:
        with write_file(out, force=force) as file:
            file.writelines(
                msgspec.json.encode(one) + b"\n" for one in (*report.asked, *(report.talk.asked if report.talk else ()))
            )
    return report


verb(
    "change",
    _measured,
    Work("telling", "stream", 0.18, {"streams": 20}),
    __doc__,
    like=evaluate,
    streams=Option("Synthetic streams of statements, or conversations in the mode talk.", "N", "--sample", least=1),
    modes=Option(f"How the statements come: {', '.join(MODES)}; may be given again. All by default.", "NAME", "--mode"),
    families=Option(f"Whose sentences: {', '.join(FAMILIES)}; may be given again. Both by default.", "NAME", "--family"),
    policy=Option("The memory policy that learns from text.", "SPEC"),
    half=Option("Half of the sentences in the mode talk: tune for rules, report for figures.", "|".join(HALVES)),
    extractors=Option(f"What learns in the mode talk: {', '.join(EXTRACTORS)}; all by default.", "NAME", "--extractor"),
    embedder=Option("Embedder for the search by meaning.", "SPEC"),
    tokens=Option("Tokens of each answer.", "TOKENS", "--budget", least=1),
    seed=Option("The first seed."),
    out=Option("Write the questions and answers to this file, one per line.", "FILE"),
)
