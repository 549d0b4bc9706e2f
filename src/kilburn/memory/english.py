"""The English words and patterns of the memory, from the file `english.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

SECTIONS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("english.toml").read_text("utf-8"))
"""Entries of the file by section and name."""


def expand(entry: str) -> str:
    """Return a pattern on one line, with the entries that it references inserted."""
    return re.sub(r"<<([\w.]+)>>", lambda match: text(match[1]), entry.replace("\n", ""))


def text(name: str) -> str:
    """Return the text of a pattern by its section and name, such as "words.kin"."""
    section, _, key = name.partition(".")
    return expand(SECTIONS[section][key])


def pattern(name: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Compile a pattern by its section and name."""
    return re.compile(text(name), flags)
