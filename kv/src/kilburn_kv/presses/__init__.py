"""Presses, one file each: which cached tokens of a sequence stay if the budget is smaller than the sequence.

`press("snapkv(window=32)")` finds one by name. They are frozen dataclasses: the same observation and budget give the
same selection. They own no tensor and change none; the engine carries out their choice.
"""

from __future__ import annotations

from kilburn.errors import SpecError
from kilburn.kernel.resolve import names as known
from kilburn.kernel.resolve import resolve
from kilburn.submodules import attach
from kilburn_kv.observation import Press

__all__ = ["names", "press"]

KIND = Press
"""What each file here has a class of."""


def press(spec: str | Press) -> Press:
    """The press that a spec names: `"window"`, `"snapkv(window=32)"`, `"pkg.mod:Name(...)"`; a press is returned as it is.

    Raises:
        SpecError: a name that resolves to nothing, arguments that do not fit, or something that is no press.
        MissingExtra: torch is not installed.
    """
    made: Press = resolve(__name__, spec)
    if not all(hasattr(made, name) for name in ("needs", "recent")):
        raise SpecError(
            f"{spec!r} is no press", advice=f"known: {', '.join(names())}; or write a class with needs, recent and keep"
        )
    return made


def names() -> list[str]:
    """The presses that ship with Kilburn, sorted.

    Raises:
        MissingExtra: torch is not installed.
    """
    return known(__name__)


attach(__name__)
