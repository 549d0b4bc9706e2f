"""Writes a matplotlib figure to a file. Equal figures give equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kilburn.errors import MissingExtra, SpecError
from kilburn.file import check_target, write_file

FORMATS = (".svg", ".png", ".pdf")


def check_picture(path: Path, *, force: bool = False) -> None:
    """Check before a long measurement that the picture can be written.

    Raises:
        SpecError: unknown format, or the file exists and `force` is False. MissingExtra: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise SpecError(f"cannot draw {path.name}", advice=f"give a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401 -- only whether it is there
    except ImportError:
        raise MissingExtra("matplotlib", "plots") from None
    check_target(path, force=force)


@contextmanager
def picture(
    path: Path,
    wide: float,
    high: float,
    *,
    force: bool = False,
    layout: Literal["constrained"] | None = "constrained",
    letters: str = "path",
) -> Iterator[Any]:
    """An empty figure of so many inches, written when the block ends; the suffix says the format.

    Args:
        letters: of an SVG: "path" for outlines, the same everywhere, or "none" for text, which is smaller.

    Raises:
        SpecError, MissingExtra: see `check_picture`. OSError: the file cannot be written.
    """
    check_picture(path, force=force)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "kilburn", "svg.fonttype": letters}):
        figure = Figure(figsize=(wide, high), dpi=120, layout=layout)
        yield figure
        with write_file(path, force=force) as file:
            figure.savefig(file, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)


def plain_axes(axes: Any, grid: float = 0.25) -> None:
    """Axes without a frame above and to the right, and with a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=grid)
