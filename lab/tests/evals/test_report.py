from __future__ import annotations

import msgspec
import pytest

from kilburn_lab.evals.report import columns, table_of


class Shown(msgspec.Struct, frozen=True):
    name: str
    share: float | None
    size: float
    kinds: dict[str, float]
    inner: Shown | None = None


ROWS = [
    Shown("one", 0.25, 3 << 20, {"a": 1.0}),
    Shown("second", None, 1 << 30, {"a": 0.5, "b": 0.125}, Shown("deep", 1.0, 0, {})),
]


def test_a_column_is_a_head_and_a_form() -> None:
    text = f"name={{name}} | share={{share:.0%}} | size={{size:,.0f MiB}} | {columns('kinds', 'ab', '.2f', 'of {}')}"
    assert table_of(ROWS, text, ("name",), "-").split("\n") == [
        "name    share       size  of a  of b",
        "one       25%      3 MiB  1.00     -",
        "second      -  1,024 MiB  0.50  0.12",
    ]


def test_a_cell_needs_all_its_fields_and_may_be_worked_out() -> None:
    table = table_of(ROWS, "name={name} | in={inner.share:.1f} of {name} | size={size:ms}", size=lambda row: len(row.name))
    assert table.split("\n") == [
        "  name             in     size",
        "   one                 3.00 ms",
        "second  1.0 of second  6.00 ms",
    ]
    assert table_of([1.5, 12.25], "wait={self:ms}", self=lambda wait: wait) == "   wait\n1.50 ms\n  12 ms"


def test_a_field_that_no_row_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="shar"):
        table_of(ROWS, "share={shar:.2f}")


def test_the_same_head_twice() -> None:
    assert table_of(ROWS[:1], "95%={share} | 95%={name}", ()) == " 95%  95%\n0.25  one"
