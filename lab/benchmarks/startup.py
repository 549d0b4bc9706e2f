"""What starting costs: `import kilburn` in a fresh interpreter, with its `open` too, beside an empty one and other imports;
with `--profile` the modules that take longest, with `--size` the installed size of the core.

`--size` installs the package in this folder's parent into a throw-away virtual environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from figures import Row, emit, median, parser, seconds_of

LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \| (\s*)(\S+)")
SUBJECTS = (
    "pass",
    "import asyncio",
    "import sqlite3",
    "import apsw",
    "import kilburn",
    "import kilburn; kilburn.open",
    "import kilburn.cli",
)


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def measure(repeat: int) -> list[Row]:
    """Rows; the baseline is an interpreter that does nothing. The rounds of all are interleaved."""
    times: dict[str, list[float]] = {code: [] for code in SUBJECTS}
    for code in SUBJECTS:
        _run(code)
    for _ in range(repeat):
        for code in SUBJECTS:
            times[code] += seconds_of(lambda code=code: _run(code), 1)
    base = median(times["pass"])
    return [
        {
            "code": code,
            "ms": median(values) * 1e3,
            "ms over an empty one": (median(values) - base) * 1e3,
            "x": median(values) / base,
        }
        for code, values in times.items()
    ]


def profile(most: int) -> list[Row]:
    """The modules that take longest by themselves, in milliseconds; the best of five runs each."""
    own: dict[str, int] = {}
    cumulative: dict[str, int] = {}
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import kilburn; kilburn.open"], check=True, capture_output=True, text=True
        )
        for line in done.stderr.splitlines():
            match = LINE.match(line)
            if match:
                name = match[4]
                own[name] = min(own.get(name, 10**9), int(match[1]))
                cumulative[name] = min(cumulative.get(name, 10**9), int(match[2]))
    worst = sorted(own, key=lambda name: -own[name])[:most]
    total = sum(own.values())
    return [
        {
            "module": name,
            "own ms": own[name] / 1e3,
            "with what it imports, ms": cumulative[name] / 1e3,
            "share": own[name] / total,
        }
        for name in worst
    ]


def size() -> list[Row]:
    """Megabytes that the core and its dependencies take on disk, without pip itself."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        before = _entries(Path(folder))
        subprocess.run([python, "-m", "pip", "install", "-q", str(root)], check=True)
        after = _entries(Path(folder))
    grown = {name: bytes_ - before.get(name, 0) for name, bytes_ in after.items() if bytes_ > before.get(name, 0)}
    total = sum(grown.values())
    rows: list[Row] = [{"installed": "all", "MB": total / 1e6, "share": 1.0}]
    return rows + [
        {"installed": name, "MB": grown[name] / 1e6, "share": grown[name] / total}
        for name in sorted(grown, key=lambda name: -grown[name])[:12]
    ]


def _entries(folder: Path) -> dict[str, int]:
    """Bytes by top-level entry of site-packages; all else as one."""
    found: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            parts = path.parts
            name = parts[parts.index("site-packages") + 1] if "site-packages" in parts else "scripts"
            found[name] = found.get(name, 0) + path.stat().st_size
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repeat", type=int, default=10)
    options.add_argument("--profile", type=int, default=0, metavar="N", help="also the N slowest modules")
    options.add_argument("--size", action="store_true", help="also the size of a fresh install (needs the package index)")
    asked = options.parse_args()
    rows = measure(asked.repeat)
    if asked.profile:
        rows += profile(asked.profile)
    if asked.size:
        rows += size()
    emit("startup", rows, asked.json)


if __name__ == "__main__":
    main()
