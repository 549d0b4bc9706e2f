"""The ledger of every policy over the same runs: kept in a file, or compared with one that was kept before.

A change to the kernel or to a policy that is meant to change no decision is checked with it: keep the ledgers
before the change, compare after it, and explain each event that differs. The runs are made up from a seed, or
read from a file of recorded runs. Each policy is driven as an agent would: thoughts, tool calls with their
results, one recall and one search every few steps, a pin, a forget near the end. The model, where a policy asks
one, echoes. Events are compared whole, but for their times.

    python lab/benchmarks/ledgers.py --keep before.jsonl
    python lab/benchmarks/ledgers.py --against before.jsonl
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec

import kilburn
from figures import Row, emit, parser
from kilburn.errors import KilburnError
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.baselines import PLAIN
from kilburn_lab.evals.roster import BELADY, entries, everybody
from kilburn_lab.evals.trajectories import read, synthetic

WINDOWS = (1000, 3000)
EVERY = 7
"""Steps between two requests for something older."""


def messages_of(run: Trajectory) -> Iterator[list[dict[str, Any]]]:
    """The head, and then each step in two appends: thought and call, and the result."""
    yield [{"role": turn.role, "content": turn.content} for turn in run.head]
    for number, step in enumerate(run.steps):
        call = {"name": "shell", "arguments": json.dumps({"command": step.action}, ensure_ascii=False)}
        calls = [{"id": f"call-{number}", "type": "function", "function": call}]
        yield [{"role": "assistant", "content": step.thought, "tool_calls": calls}]
        yield [{"role": "tool", "tool_call_id": f"call-{number}", "content": step.observation}]
        if number % EVERY == EVERY - 1:
            yield [{"role": "user", "content": f"Go on, and mind {step.action[:40]!r}."}]


def ledger_of(run: Trajectory, spec: str, window: int, model: str | None) -> list[str]:
    """The events of one run, as one line each."""
    # Without vectors: what a search finds must not depend on how far a thread has come.
    with kilburn.open(":memory:", window=window, policy=spec, tokenizer="chars/4", model=model, embedder=None) as store:
        session = store.session("run")
        ends = []
        for number, some in enumerate(messages_of(run)):
            try:
                session.append(*some)
                if number % EVERY == EVERY - 1:
                    session.render()
                    last = len(session.contents.pages())
                    session.recall(f"p{1 + last // 3}")
                    session.search(run.steps[number // 3].action[:60] or "the")
                if number == 2 * EVERY:
                    session.pin(f"p{max(2, len(session.contents.pages()) - 3)}")
                if number == 4 * EVERY:
                    session.forget(f"p{len(session.contents.pages()) // 2}")
            except KilburnError as error:
                ends.append(f"raised {type(error).__name__}: {error}")
            # A question in the background is answered before the next event, so that the run is the same each time.
            for thread in threading.enumerate():
                if thread.name == "kilburn-later":
                    thread.join()
        session.render()
        return [_line(event) for event in session.ledger.events()] + ends


def _line(event: Any) -> str:
    fields = msgspec.to_builtins(event)
    fields.pop("time", None)
    return json.dumps(fields, sort_keys=True, ensure_ascii=True)


def measured(runs: list[Trajectory], policies: list[str]) -> Iterator[dict[str, Any]]:
    """Each policy at each window over each run."""
    for window in WINDOWS:
        for entry in entries(policies, "echo", window):
            if entry.spec in PLAIN or entry.spec == BELADY:
                continue
            for run in runs:
                found = ledger_of(run, entry.at(window), window, "echo" if entry.model else None)
                yield {"policy": entry.label, "window": window, "run": run.id, "events": found}


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "")
    options.add_argument(
        "--data", type=Path, help="recorded runs, in any form that `kilburn replay` reads; made-up ones where none are given"
    )
    options.add_argument("--runs", type=int, default=4)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--policy", action="append", help="all unless given")
    options.add_argument("--keep", type=Path, help="write the ledgers here, gzip")
    options.add_argument("--against", type=Path, help="compare with ledgers that were kept")
    options.add_argument("--show", type=int, default=3, help="differences to print of each policy and window")
    given = options.parse_args()
    runs = list(islice(read(given.data), given.runs)) if given.data else list(synthetic(given.runs, given.seed))
    policies = given.policy or [name for name in everybody() if name not in PLAIN]
    before: dict[tuple[str, int, str], list[str]] = {}
    if given.against:
        with gzip.open(given.against, "rt", encoding="utf-8") as lines:
            for line in lines:
                kept = json.loads(line)
                before[kept["policy"], kept["window"], kept["run"]] = kept["events"]
    rows: dict[tuple[str, int], Row] = {}
    kept_lines = []
    for one in measured(runs, policies):
        kept_lines.append(json.dumps(one))
        key = one["policy"], one["window"]
        row = rows.setdefault(key, {"policy": one["policy"], "window": one["window"], "events": 0, "digest": ""})
        row["events"] = int(row["events"]) + len(one["events"])
        row["digest"] = hashlib.sha256((str(row["digest"]) + "\n".join(one["events"])).encode()).hexdigest()[:12]
        if given.against:
            old = before.get((*key, one["run"]))
            row["differ"] = int(row.get("differ", 0)) + (old != one["events"])
            if old != one["events"]:
                _show(one, old, given.show if int(row["differ"]) == 1 else 0)
    if given.keep:
        with gzip.open(given.keep, "wt", encoding="utf-8") as file:
            file.write("\n".join(kept_lines) + "\n")
    emit("ledgers", rows.values(), given.json, f"{len(runs)} runs, {EVERY} steps between requests; policies ask the model echo")
    if not rows:
        raise SystemExit("nothing was run: give --runs 1 or more, and policies that there are")
    if any(row.get("differ") for row in rows.values()):
        raise SystemExit(1)


def _show(one: dict[str, Any], old: list[str] | None, most: int) -> None:
    """Where two ledgers part: the first lines that differ."""
    if most and old is None:
        print(f"{one['policy']} at {one['window']}, {one['run']}: was not there before")
        return
    pairs = [pair for pair in zip_longest(old or [], one["events"], fillvalue="(nothing)") if pair[0] != pair[1]]
    for was, now in pairs[:most]:
        print(f"{one['policy']} at {one['window']}, {one['run']}:\n  was {was[:400]}\n  now {now[:400]}")


if __name__ == "__main__":
    main()
