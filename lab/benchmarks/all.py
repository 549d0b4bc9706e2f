"""Every goal of the performance page, measured in one run, each with its baseline: a table, JSON, a picture, and the page itself.

The figures come from the other benchmarks and from `kilburn lab`, each in an operating-system process of its own; this file knows
which of their figures has which goal. Runs, traces and conversations are taken from a folder (--data), with `trajectories/`,
`kv_traces/` and `recall/` in it, else they are made up. What is saved (--save) lies beside the page, which is made from it; with
--only, the figures of these parts alone are replaced.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from figures import parser
from ratios import Ratio, Result, as_json, draw, rewritten, table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "explanation" / "performance.md"
SAVED = PAGE.with_suffix(".json")
DRAWN = PAGE.with_suffix(".svg")
FILES = {"runs": "trajectories/*.jsonl.gz", "traces": "kv_traces/*.jsonl.gz", "talks": "recall/locomo.jsonl.gz"}
"""What a command's `{runs}`, `{traces}` and `{talks}` stand for: the first such file, or made-up data."""

LONGEST = 420.0
"""Seconds that one part may take, so that a slow one leaves something for the others."""

Found = Mapping[str, Any]


class Part(NamedTuple):
    """A measurement: the line of its goals, its command, the sizes behind it, or those of a quick look, and what to read."""

    line: int
    command: str
    sizes: str
    quick: str
    read: Callable[[Found], Iterator[Ratio]]


def _by(rows: list[Found], *names: str) -> dict[Any, Found]:
    return {tuple(row[name] for name in names) if len(names) > 1 else row[names[0]]: row for row in rows}


def _chat(found: Found) -> Iterator[Ratio]:
    rows = _by(found["rows"], "policy")
    own = rows["hybrid"]
    where = f"hybrid, a chat of {own['exchanges']} questions, {own['window']:,}"
    yield Ratio(
        what=f"{where}: share of the prefix kept", measured=own["kept"], baseline=rows["cost"]["kept"], against="cost",
        goal=0.95, least=True,
    )  # fmt: skip
    yield Ratio(
        what=f"{where}: a turn in its last tenth", unit="ms", measured=own["last"], baseline=rows["fifo"]["last"], against="fifo",
        goal=3,
    )  # fmt: skip
    for policy in ("hybrid", "cost"):
        row = rows[policy]
        yield _ahead(f"{policy}, a chat of {row['exchanges']} questions: right answers", row["right"], row, 0.0)


NEEDED = {"copy": "copies", "name": "names"}
KEPT = {2000: 0.75, 4000: 0.85, 8000: 0.90}


def _paging(found: Found) -> Iterator[Ratio]:
    rows = _by(found["rows"], "policy", "window")
    windows = sorted({window for _, window in rows})
    for window in (each for each in windows if each in KEPT):
        yield Ratio(
            what=f"hybrid, agents' runs, {window:,}: share of the tokens not read again",
            measured=1 - rows["hybrid", window]["again_share"], baseline=1 - rows["cost", window]["again_share"], against="cost",
            goal=KEPT[window], least=True,
        )  # fmt: skip
    for kind, policy, ahead in (("copy", "hybrid", 0.05), ("name", "hybrid", 0.0), ("name", "cost", 0.0)):
        for window in windows:
            share = rows[policy, window]["by_action"].get(kind)
            if share is not None and (policy, window) != ("cost", 8000):
                yield _ahead(f"{policy}, {window:,}: {NEEDED[kind]} by action", share["share"], share, ahead)


def _ahead(what: str, measured: float, row: Found, goal: float) -> Ratio:
    """A share that should be so far ahead of the best baseline, or all."""
    base = measured - row["gain"]
    goal = round(min(goal, 1 - base), 6)
    return Ratio(what=what, measured=measured, baseline=base, against=row["best"], goal=goal, of="difference", least=True)


def _answers(found: Found) -> Iterator[Ratio]:
    for policy in ("hybrid", "cost"):
        for row in found["rows"]:
            if row["policy"] == policy:
                yield _ahead(f"{policy}, {row['window']:,}: right answers", row["right"], row, 0.0)


def _tasks(found: Found) -> Iterator[Ratio]:
    for policy in ("hybrid", "cost"):
        for row in found["rows"]:
            if row["policy"] == policy:
                yield _ahead(f"{policy}, {row['window']:,}: tasks solved", row["solved"], row, 0.0)


def _bills(found: Found) -> Iterator[Ratio]:
    rows = _by(found["bills"], "provider", "policy", "window")
    for (provider, policy, window), row in rows.items():
        if policy == "hybrid" and row["each"] is not None:
            base = rows[provider, "history", window]["each"]
            yield Ratio(
                what=f"hybrid, {window:,}, {provider}: 1,000 right answers", unit="$", measured=row["each"], baseline=base,
                against="the full history, cached", goal=1.0, of="ratio",
            )  # fmt: skip


def _natural(found: Found) -> Iterator[Ratio]:
    for row in found["rows"]:
        if row["policy"] in ("hybrid", "cost"):
            what = f"{row['policy']}, {row['window']:,}: turns that answer people's questions, shown whole"
            yield _ahead(what, row["shown"], row, 0.05)
    bills = _by(found["bills"], "provider", "policy", "window")
    for (provider, policy, window), row in bills.items():
        if policy == "hybrid" and row["each"] is not None:
            yield Ratio(
                what=f"hybrid, {window:,}, {provider}: 1,000 such questions", unit="$", measured=row["each"],
                baseline=bills[provider, "history", window]["each"], against="the full history, cached", goal=1.0, of="ratio",
            )  # fmt: skip


def _kv(found: Found) -> Iterator[Ratio]:
    for row in found["rates"]:
        if row["policy"] == "returning" and row["closed"] is not None:
            yield Ratio(
                what=f"{row['capacity']:,} tokens: of the way from LRU to the optimum", measured=row["closed"],
                goal=0.45, least=True,
            )  # fmt: skip
            yield Ratio(
                what=f"{row['capacity']:,} tokens: the choice of a block", unit="µs", measured=row["chosen"],
                baseline=_by(found["rates"], "policy", "capacity")["lru", row["capacity"]]["chosen"], against="LRU", goal=5,
            )  # fmt: skip


def _sizes(found: Found) -> Iterator[Ratio]:
    for row in found["rows"]:
        name, bare, grown = row["session"], row["bare insert ms"], "," in row["session"].partition(" pages")[2]
        size = None if grown else row["pages"]
        for which, goal in (("p50", 3), ("p95", 8)):
            yield Ratio(
                what=f"a turn, {name}, {which}", unit="ms", measured=row[f"turn {which} ms"], baseline=bare, goal=goal,
                of="ratio", against="a bare synced insert", panel="One more turn", curve=which, size=size,
            )  # fmt: skip
        yield Ratio(
            what=f"a question, {name}", unit="ms", measured=row["question ms"], goal=3,
            panel="A short question, processor time", curve="hybrid", size=size,
        )  # fmt: skip
        yield Ratio(
            what=f"a fork, {name}", unit="ms", measured=row["fork ms"], baseline=row["append ms"], against="an append", goal=2,
            of="ratio", panel="A fork, processor time", curve="fork", size=size,
        )  # fmt: skip


def _planning(found: Found) -> Iterator[Ratio]:
    base = found["rows"][0]["acts p50 ms"]
    for row in found["rows"][1:]:
        if "acts p50 ms" in row:
            yield Ratio(
                what=f"a plan over {row['pages']:,} resident pages, {row['policy']}", unit="ms", measured=row["acts p50 ms"],
                baseline=base, against="adding up tokens", goal=10,
            )  # fmt: skip


def _live(found: Found) -> Iterator[Ratio]:
    for row in found["rows"]:
        yield Ratio(
            what=f"the slowest plan of a live session, {row['over pages']:,} pages, {row['policy']}", unit="ms",
            measured=row["slowest act ms"], goal=10,
        )  # fmt: skip


def _bulk(found: Found) -> Iterator[Ratio]:
    rows = _by(found["rows"], "import")
    for name, row in rows.items():
        if name.startswith("append"):
            yield Ratio(
                what=f"import of tool calls, {name.removeprefix('append, ')}", unit="pages/s", measured=row["pages/s"],
                baseline=rows["store.commit"]["pages/s"], against="the store alone", goal=10_000, least=True,
            )  # fmt: skip


GATEWAY = {20: (2, 2), 1000: (3, 5)}
"""By messages: milliseconds added to the first byte, and of the processor."""


def _gateway(found: Found) -> Iterator[Ratio]:
    rows = _by(found["rows"], "system")
    own, base = rows["kilburn"], rows["pass-through"]
    for mine, theirs in zip(own["latencies"], base["latencies"], strict=True):
        added, worked = GATEWAY[mine["messages"]]
        how, byte = ("streamed", "first") if mine["streamed"] else ("not streamed", "last")
        for what, figure, goal in ((f"added to the {byte} byte, p50", "added_p50", added), (f"processor, {how}", "cpu", worked)):
            yield Ratio(
                what=f"{mine['messages']:,} messages: {what}", unit="ms", measured=mine[figure], baseline=theirs[figure],
                against="pass-through", goal=goal,
            )  # fmt: skip
    yield Ratio(
        what="20 messages, 16 at once: processor, not streamed", unit="ms", measured=own["cpu"], baseline=base["cpu"],
        against="pass-through", goal=2,
    )  # fmt: skip


SEARCH = {1_000: 1, 10_000: 1, 100_000: 3, 1_000_000: 10}


def _search(found: Found) -> Iterator[Ratio]:
    floors = {row["count"]: row for row in found["rows"] if row["system"] == "floor"}
    for row in (each for each in found["rows"] if each["system"] == "kilburn"):
        count = row["count"]
        yield Ratio(
            what=f"search among {count:,}, by words", unit="ms", measured=row["words_cpu"], baseline=floors[count]["words_cpu"],
            against="FTS5's rank", goal=SEARCH[count], panel="A search, processor time", curve="by words", size=count,
        )  # fmt: skip
        yield Ratio(
            what=f"search among {count:,}, with vectors", unit="ms", measured=row["cpu"], baseline=row["words_cpu"],
            against="by words", goal=2, of="ratio", panel="A search, processor time", curve="with vectors", size=count,
        )  # fmt: skip


def _recall(found: Found) -> Iterator[Ratio]:
    rows = _by(found["rows"], "ranking")
    yield Ratio(
        what="E3, recall of the evidence at 10, by words", measured=rows["blend"]["at"]["10"], baseline=rows["words"]["at"]["10"],
        against="words alone", goal=0.0, of="difference", least=True,
    )  # fmt: skip


def _dashboard(found: Found) -> Iterator[Ratio]:
    for row in found["rows"]:
        if "first ms" in row:
            yield Ratio(what=f"{row['what']}: processor", unit="ms", measured=row["first ms"], goal=row["aim ms"])
        else:
            yield Ratio(
                what=row["what"], unit="ms", measured=row["with a dashboard ms"], baseline=row["alone ms"], against="alone",
                goal=row["aim"], of="ratio",
            )  # fmt: skip
    rows = max(row["rows"] for row in found["rows"] if "rows" in row)
    yield Ratio(what="pages or prompts on a screen, at most", measured=rows, goal=120)


LAB = "-m kilburn lab"
PLANNERS = (
    "fifo", "lru", "importance", "tiered", "mask", "preprocess", "hybrid", "cost", "summarize(ask=False)", "agentfold", "comem",
    "chain(preprocess,mask(keep=3),hybrid)",
)  # fmt: skip
BASELINES = "--policy tail --policy truncated --policy last3 --policy tail+turns --policy tail+chunks --policy tail+outputs"
"""The plain ones that are ever the best."""
WIDE = "--window 1000 --window 2000 --window 4000"
PARTS = {
    "chat": Part(
        1, f"{LAB} chat --policy tail+turns --policy tail+chunks --policy fifo --policy summarize --policy cost --policy hybrid",
        "--sample 600", "--sample 160", _chat,
    ),
    "paging": Part(
        1, f"{LAB} paging {{runs}} {WIDE} --window 8000 --referring {BASELINES} --policy cost --policy hybrid", "--sample 40",
        "--sample 4", _paging,
    ),
    "natural": Part(
        2, f"{LAB} natural {{talks}} --embedder none --window 2000 --window 4000 --window 8000", "--sample 40 --conversations 5",
        "--sample 2 --conversations 1", _natural,
    ),
    "answers": Part(2, f"{LAB} answers {{runs}} {WIDE}", "--sample 20", "--sample 2 --questions 2", _answers),
    "tasks": Part(2, f"{LAB} tasks {WIDE}", "--sample 24", "--sample 2", _tasks),
    "bills": Part(
        3, f"{LAB} answers {{runs}} --tools {WIDE} --policy cost --policy hybrid", "--sample 12", "--sample 2 --questions 2",
        _bills,
    ),
    "kv": Part(4, f"{LAB} kv {{traces}} --sub-agents --policy returning", "--full", "--sample 8 --capacity 200000", _kv),
    "sizes": Part(5, "sizes.py", "--embedder 10000", "--pages 100 --pages 300 --rounds 10", _sizes),
    "planning": Part(
        5, f"planning.py {' '.join(f'--policy {each}' for each in PLANNERS)}", "--pages 10000", "--pages 100 --repeat 2",
        _planning,
    ),
    "live": Part(5, "planning.py --live --policy compact", "--pages 10000", "--pages 60", _live),
    "bulk": Part(5, "bulk.py", "--size 1000", "--pages 100 --size 50 --repeat 1", _bulk),
    "gateway": Part(
        6, f"{LAB} bench gateway", "--rounds 60 --requests 1000 --streams 20 --sessions 10000",
        "--rounds 5 --requests 20 --streams 2", _gateway,
    ),
    "search": Part(
        7, f"{LAB} scale --questions 60", "--count 1000 --count 10000 --count 100000 --count 1000000", "--count 1000", _search,
    ),
    "recall": Part(7, f"{LAB} recall {{talks}} --embedder none --out {{folder}}/rankings.jsonl", "--full", "", _recall),
    "dashboard": Part(
        8, "screens.py", "--requests 200 --pairs 12",
        "--sessions 3 --pages 60 --long 120 --times 1 --pairs 1 --requests 12", _dashboard,
    ),
}  # fmt: skip


def measured(name: str, data: Path | None, *, quick: bool, left: float) -> Result:
    """Run one part, in `left` seconds at most."""
    part, begun = PARTS[name], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kilburn-all-") as folder:
        command = _command(part, data, folder, quick=quick)
        found, missing = _found(command, left)
    ratios: list[Ratio] = []
    try:
        for ratio in part.read(found) if found is not None else ():
            ratios.append(ratio)
    except KeyError as error:
        missing = f"the measurement has no {error}"
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    return Result(
        part=name, line=part.line, command=_shown(command), machine=machine, seconds=time.monotonic() - begun, ratios=ratios,
        missing=missing,
    )  # fmt: skip


def _found(command: list[str], left: float) -> tuple[Found | None, str]:
    """The JSON that a command prints, or why it printed none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return None, "no time was left"
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        return None, _last_words(done)


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command printed no figures: the error's message, which stands on its last line."""
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    try:
        error = json.loads(last)["error"]
    except (ValueError, KeyError, TypeError):
        return last
    return f"{error['message']}; {error['advice']}"


def _command(part: Part, data: Path | None, folder: str, *, quick: bool) -> list[str]:
    given = dict.fromkeys(FILES, "")
    for name, form in FILES.items():
        for file in sorted(data.glob(form))[:1] if data is not None else ():
            given[name] = f"--data {shlex.quote(str(file))}"
    words = shlex.split(part.command.format(folder=folder, **given)) + shlex.split(part.quick if quick else part.sizes)
    if not words[0].startswith("-"):
        words[0] = str(HERE / words[0])
    return [sys.executable, *words, "--json"]


def _shown(command: list[str]) -> str:
    """A command for people: no folders, and `kilburn` by its name."""
    words = [Path(word).name if word.startswith("/") else word for word in command[1:-1]]
    return " ".join(["kilburn", *words[2:]] if words[0] == "-m" else ["python", f"lab/benchmarks/{words[0]}", *words[1:]])


def saved() -> list[Result]:
    """What the page is made from, in the order of the parts."""
    if not SAVED.exists():
        return []
    known = {result.part: result for result in msgspec.json.decode(SAVED.read_bytes(), type=list[Result])}
    return [known[name] for name in PARTS if name in known]


def save(result: Result) -> None:
    """Keep what a part found, in place of what it found before."""
    known = {**{one.part: one for one in saved()}, result.part: result}
    kept = [known[name] for name in PARTS if name in known]
    SAVED.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def write_page() -> None:
    """Rewrite the page's table and picture from what was saved."""
    results = saved()
    # A group of which nothing is measured yet is not on the page at all.
    there, groups = {result.part for result in results}, {result.line for result in results}
    left = [name for name, part in PARTS.items() if name not in there and part.line in groups]
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), results, DRAWN.name, left), encoding="utf-8")
    draw(DRAWN, results, force=True)


def main() -> None:
    """Measure what is asked for, and write what is wanted."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--only", action="append", choices=list(PARTS), help="a part; may be given again")
    options.add_argument("--quick", action="store_true", help="tiny sizes: it shows that all works, and its figures say nothing")
    options.add_argument("--data", type=Path, metavar="DIR", help="where runs, traces and conversations are; made up if left out")
    options.add_argument("--minutes", type=float, default=20, help="what has no time left is not measured (default: 20)")
    options.add_argument("--save", action="store_true", help="keep the figures for the page, and rewrite it")
    options.add_argument("--page", action="store_true", help="only rewrite the page from the figures that were saved")
    asked = options.parse_args()
    if asked.data is not None and not asked.data.is_dir():
        options.error(f"no folder {asked.data}")
    if asked.save and asked.quick:
        options.error("--save keeps no figures of --quick")
    if asked.page:
        write_page()
        return
    names, end = asked.only or list(PARTS), time.monotonic() + 60 * asked.minutes
    results = []
    for number, name in enumerate(names, 1):
        print(f"{number} of {len(names)}: {name} ...", file=sys.stderr, flush=True)
        left = max(0.1, min(LONGEST, end - time.monotonic()))
        results.append(measured(name, asked.data, quick=asked.quick, left=left))
        result = results[-1]
        print(f"  {result.seconds:.0f} s, {len(result.ratios)} figures {result.missing}".rstrip(), file=sys.stderr, flush=True)
        if asked.save:
            save(result)
    print(as_json(results) if asked.json else table(results))
    if asked.save:
        write_page()


if __name__ == "__main__":
    main()
