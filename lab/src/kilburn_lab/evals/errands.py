"""A small world with a real shell: a folder with files and with programs of made-up names, and errands that need several of them.

What a program is called and which letters its options have differs from world to world, so nobody knows it before having looked.
An errand is done if the files that it asks for are there, byte for byte, and the others are as they were: the world works that
out itself, and knows nothing of how it was done.

Commands run in a restricted shell (`bash --restricted`): it has no programs but those of the world, which touch nothing outside
its folder. That keeps a clumsy model from harm; it is no sandbox for a malicious one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn_lab.evals.measure import SYLLABLES, coined
from kilburn_lab.evals.sample import HALVES

SECONDS = 10.0
"""That a command may take."""

OUTPUT = 2_000
"""Characters of its output that are shown."""

LETTERS = "abcdefgijklmpqrsuvwxyz"
WORDS = ("oak", "elm", "ash", "fir", "yew", "box", "may", "bay", "fig", "nut")

Lines = list[str]


class Craft(msgspec.Struct, frozen=True):
    """What a program can do.

    Args:
        says: what its help says. takes: its arguments, in the order of an errand's words. body: of the program, for a shell.
        asks: how errands ask for it, in each half.
        does: the lines that come out, from the lines that go in and the words of the errand.
    """

    says: str
    takes: tuple[str, ...]
    body: str
    asks: tuple[str, str]
    does: Callable[[Lines, Sequence[str]], Lines]


def _unique(lines: Lines, _: Sequence[str]) -> Lines:
    return list(dict.fromkeys(lines))


CRAFTS = (
    Craft(
        "puts the lines of a file in order, from A to Z",
        ("FROM", "INTO"),
        'LC_ALL=C sort "$FROM" > "$INTO"',
        ("Put the lines of {0} in order, into {1}", "Copy {0} to {1} with its lines in order"),
        lambda lines, _: sorted(lines),
    ),
    Craft(
        "puts the lines of a file in order, from Z to A, backwards",
        ("FROM", "INTO"),
        'LC_ALL=C sort -r "$FROM" > "$INTO"',
        ("Put the lines of {0} in order backwards, into {1}", "Copy {0} to {1} with its lines in order backwards"),
        lambda lines, _: sorted(lines, reverse=True),
    ),
    Craft(
        "counts the lines of a file, and writes the number",
        ("FROM", "INTO"),
        'grep -c "" "$FROM" > "$INTO"',
        ("Count the lines of {0}, and write the number into {1}", "Count lines of {0} and write their number to {1}"),
        lambda lines, _: [str(len(lines))],
    ),
    Craft(
        "counts the letters of a file, and writes the number",
        ("FROM", "INTO"),
        'tr -cd a-zA-Z < "$FROM" | wc -c | tr -d " " > "$INTO"',
        ("Count the letters of {0}, and write the number into {1}", "Count letters of {0} and write their number to {1}"),
        lambda lines, _: [str(sum(letter.isalpha() for line in lines for letter in line))],
    ),
    Craft(
        "writes a file in capitals",
        ("FROM", "INTO"),
        'tr a-z A-Z < "$FROM" > "$INTO"',
        ("Write {0} in capitals, into {1}", "Write all of {0} in capitals to {1}"),
        lambda lines, _: [line.upper() for line in lines],
    ),
    Craft(
        "turns a file around: its last line comes first",
        ("FROM", "INTO"),
        'sed -n "1!G;h;\\$p" "$FROM" > "$INTO"',
        ("Turn {0} around, the last line first, into {1}", "Turn {0} around so that its last line comes first, to {1}"),
        lambda lines, _: lines[::-1],
    ),
    Craft(
        "joins two files, one behind the other",
        ("FROM", "WITH", "INTO"),
        'cat "$FROM" "$WITH" > "$INTO"',
        ("Join {0} and {1}, into {2}", "Join two files, {0} and {1}, to {2}"),
        lambda lines, _: lines,
    ),
    Craft(
        "takes the first lines of a file, so many",
        ("COUNT", "FROM", "INTO"),
        'head -n "$COUNT" "$FROM" > "$INTO"',
        ("Take the first {0} lines of {1}, into {2}", "Keep the first {0} lines of {1} in {2}"),
        lambda lines, words: lines[: int(words[0])],
    ),
    Craft(
        "takes the last lines of a file, so many",
        ("COUNT", "FROM", "INTO"),
        'tail -n "$COUNT" "$FROM" > "$INTO"',
        ("Take the last {0} lines of {1}, into {2}", "Keep the last {0} lines of {1} in {2}"),
        lambda lines, words: lines[-int(words[0]) :],
    ),
    Craft(
        "replaces a word in a file by another",
        ("WORD", "BY", "FROM", "INTO"),
        'sed "s/$WORD/$BY/g" "$FROM" > "$INTO"',
        ('Replace the word "{0}" by "{1}" in {2}, into {3}', 'Replace each word "{0}" by "{1}" in {2}, to {3}'),
        lambda lines, words: [line.replace(words[0], words[1]) for line in lines],
    ),
    Craft(
        "leaves out the lines of a file that were there before",
        ("FROM", "INTO"),
        'awk \'!seen[$0]++\' "$FROM" > "$INTO"',
        ("Leave out the lines of {0} that were there before, into {1}", "Leave out what {0} had before, line by line, to {1}"),
        _unique,
    ),
    Craft(
        "puts its number before each line of a file",
        ("FROM", "INTO"),
        'awk \'{print NR ": " $0}\' "$FROM" > "$INTO"',
        ("Put its number before each line of {0}, into {1}", "Put the number of each line before it, from {0} to {1}"),
        lambda lines, _: [f"{at}: {line}" for at, line in enumerate(lines, 1)],
    ),
)

PROGRAM = """#!/bin/sh
PATH=/usr/bin:/bin
usage='usage: {name} {options}
{says}'
while [ $# -gt 0 ]; do
  case "$1" in
{cases}    --help) echo "$usage"; exit 0;;
    *) echo "$usage" >&2; exit 2;;
  esac
done
for value in {values}; do
  case "$value" in ""|-*|*/*|*.sh|*[!a-zA-Z0-9.]*) echo "$usage" >&2; exit 2;; esac
done
for file in "$FROM" {second}; do [ -f "$file" ] || {{ echo "there is no file $file" >&2; exit 1; }}; done
{body}
"""

LOOK = """#!/bin/sh
PATH=/usr/bin:/bin
for value in "$@"; do case "$value" in bin) ;; ""|-*|*/*|*..*) echo "not there: $value" >&2; exit 1;; esac; done
exec {program} "$@"
"""


class Errand(msgspec.Struct, frozen=True):
    """A task.

    Args:
        text: what is asked for, a part for each program.
        files: what there is to begin with, by name. wanted: what there must be in the end.
    """

    text: str
    parts: int
    files: dict[str, str]
    wanted: dict[str, str]


class ErrandWorld:
    """A folder with its programs, and the errands in it.

    Args:
        folder: an empty one.
        seed: of the names, the options and the errands.
        half: whose wordings the errands have.

    Raises:
        SpecError: this machine has no bash.
    """

    def __init__(self, folder: Path, seed: int, half: str = HALVES[0]) -> None:
        found = shutil.which("bash")
        if found is None:
            raise SpecError("there is no bash on this machine", advice="install it: the errands are done in its restricted shell")
        self._bash, self.folder = found, folder
        self._half = HALVES.index(half)
        self._chance = random.Random(f"errands/{seed}")
        self._used = {"bin", *WORDS}
        (folder / "bin").mkdir()
        for name in ("ls", "cat"):
            self._install(name, LOOK.format(program=shutil.which(name)))
        self.programs = {self._program(craft): craft for craft in CRAFTS}

    def _program(self, craft: Craft) -> str:
        name = coined(self._chance, SYLLABLES, 2, self._used)
        letters = self._chance.sample(LETTERS, len(craft.takes))
        order = self._chance.sample(range(len(letters)), len(letters))
        self._install(
            name,
            PROGRAM.format(
                name=name,
                options=" ".join(f"-{letters[at]} {craft.takes[at]}" for at in order),
                says=craft.says,
                cases="".join(
                    f'    -{letter}) {what}="$2"; shift; shift;;\n' for letter, what in zip(letters, craft.takes, strict=True)
                ),
                values=" ".join(f'"${what}"' for what in craft.takes),
                second='"$WITH"' if "WITH" in craft.takes else "",
                body=craft.body,
            ),
        )
        return name

    def _install(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def errand(self, parts: int) -> Errand:
        """An errand of so many parts; each but the first goes on with what the one before has made."""
        chance, files, wanted = self._chance, dict[str, str](), dict[str, str]()
        told: list[str] = []
        lines = self._lines()
        source = self._file()
        files[source] = _text(lines)
        for craft in chance.sample(CRAFTS, parts):
            words = {"FROM": source, "INTO": self._file(), "COUNT": str(chance.randint(2, 4))}
            words["WORD"], words["BY"] = chance.sample(WORDS, 2)
            if "WITH" in craft.takes:
                words["WITH"], other = self._file(), self._lines()
                files[words["WITH"]] = _text(other)
                lines = [*lines, *other]
            values = [words[what] for what in craft.takes]
            lines = craft.does(lines, values)
            text = craft.asks[self._half].format(*values)
            told.append(text if not told else text[:1].lower() + text[1:])
            source = words["INTO"]
            wanted[source] = _text(lines)
        polite = chance.choice(("", "Please do this: ", "Now this: "))
        return Errand(f"{polite}{'; then '.join(told)}.", parts, files, files | wanted)

    def _lines(self) -> Lines:
        return [" ".join(self._chance.choices(WORDS, k=2)) for _ in range(self._chance.randint(5, 8))]

    def _file(self) -> str:
        return f"{coined(self._chance, SYLLABLES, 3, self._used)}.txt"

    def begin(self, errand: Errand) -> None:
        """Put the files of an errand there, and nothing else."""
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()
        for name, text in errand.files.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def is_done(self, errand: Errand) -> bool:
        """Whether the files are as the errand wants them."""
        there = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}
        return all(there.get(name) == text.encode() for name, text in errand.wanted.items())

    def shell(self, command: str) -> str:
        """Run a command in the folder: what it printed, after `exit N` where it failed."""
        limits = "ulimit -t 5 -f 20000; enable -n kill ulimit"
        with subprocess.Popen(
            [self._bash, "--noprofile", "--norc", "--restricted", "-c", f"{limits}\n{command}"],
            cwd=self.folder,
            env={"PATH": str(self.folder / "bin"), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return f"exit 124\nstopped after {SECONDS:g} seconds"
        told = output.decode("utf-8", "replace")[:OUTPUT]
        return f"exit {process.returncode}\n{told}" if process.returncode else told


def _text(lines: Lines) -> str:
    return "".join(f"{line}\n" for line in lines)
