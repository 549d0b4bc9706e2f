"""What one `append` with room does: the functions of Kilburn that it enters, and its processor time.

The message is a user's, of one line, in a window with room, on a real file. Functions are counted as distinct ones, with their
calls and files; comprehensions are none. The baseline of the same run is a bare synced insert of the same text; rounds of all
are interleaved, so that a noisy moment hits all of them. `--functions` lists what is entered, by file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import apsw

import kilburn
from figures import Row, emit, median, parser

POLICIES = ["fifo", "hybrid", "cost"]
ROOM = 1_000_000
BEFORE = 20
"""Questions and answers before what is measured: as many as there are in a short session."""


def entered(work: Callable[[], object]) -> Counter[tuple[str, str]]:
    """The functions of Kilburn that a piece of work enters, each as file and name, with its calls."""
    found: Counter[tuple[str, str]] = Counter()
    home = str(Path(kilburn.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home) and not code.co_name.startswith("<"):
            found[code.co_filename[len(home) + 1 :], code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def _line(number: int) -> str:
    return f"one more question, the {number:08d}th"


def _bare(path: Path) -> apsw.Connection:
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "WAL")
    db.pragma("synchronous", "FULL")
    db.execute("CREATE TABLE page(id INTEGER PRIMARY KEY, body TEXT)")
    return db


def measure(policies: list[str], rounds: int) -> tuple[list[Row], dict[str, Counter[tuple[str, str]]]]:
    """A row for the bare insert and one for each policy, and what each enters."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        bare = _bare(Path(folder) / "bare.db")
        stores = [
            kilburn.open(Path(folder) / f"{at}.db", window=ROOM, policy=policy, tokenizer="chars/4", embedder=None)
            for at, policy in enumerate(policies)
        ]
        sessions = [store.session("s") for store in stores]
        for session in sessions:
            for number in range(BEFORE):
                session.append({"role": "user", "content": _line(number)})
                session.append({"role": "assistant", "content": f"answer {number}"})
        counted = {
            policy: entered(lambda session=session: session.append({"role": "user", "content": _line(BEFORE)}))  # type: ignore[misc]
            for policy, session in zip(policies, sessions, strict=True)
        }
        times: list[list[float]] = [[] for _ in range(len(policies) + 1)]
        for number in range(BEFORE + 1, BEFORE + 1 + rounds):
            text = _line(number)
            start = time.process_time()
            bare.execute("INSERT INTO page(body) VALUES(?)", (text,))
            times[0].append(time.process_time() - start)
            for session, some in zip(sessions, times[1:], strict=True):
                start = time.process_time()
                session.append({"role": "user", "content": text})
                some.append(time.process_time() - start)
        for store in stores:
            store.close()
        bare.close()
    base = median(times[0])
    rows: list[Row] = [{"append": "bare insert, synced", "functions": 0, "calls": 0, "files": 0, "us": base * 1e6, "x bare": 1.0}]
    for policy, some in zip(policies, times[1:], strict=True):
        found = counted[policy]
        figures = {"functions": len(found), "calls": found.total(), "files": len({file for file, _ in found})}
        rows.append({"append": policy, **figures, "us": median(some) * 1e6, "x bare": median(some) / base})
    return rows, counted


def main() -> None:
    """Run it."""
    options = parser(__doc__ or "")
    options.add_argument("--policy", action="append", help=f"may be given several times; {', '.join(POLICIES)} where none is")
    options.add_argument("--rounds", type=int, default=1000)
    options.add_argument("--functions", action="store_true", help="list the functions too")
    asked = options.parse_args()
    rows, counted = measure(asked.policy or POLICIES, asked.rounds)
    emit("append", rows, asked.json, f"Processor time, medians of {asked.rounds} rounds; Kilburn {kilburn.__version__}.")
    if asked.functions:
        for policy, found in counted.items():
            print(policy)
            for (file, name), calls in sorted(found.items()):
                print(f"  {file}: {name} {calls}")


if __name__ == "__main__":
    main()
