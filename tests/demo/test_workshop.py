"""The demo's tools, and the explorer that calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilburn.demo.explorer import Explorer
from kilburn.demo.workshop import Workshop
from kilburn.model import Request, complete


def test_a_read_shows_numbered_lines_and_how_many_there_are(shared_tree: Path) -> None:
    lines = (shared_tree / "textwrap.py").read_text().split("\n")[:-1]
    shown = Workshop(shared_tree).read("textwrap.py", start=3, lines=2)
    assert shown == f"textwrap.py lines 3-4 of {len(lines)}\n3\t{lines[2]}\n4\t{lines[3]}"


def test_a_form_feed_or_a_carriage_return_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(b"a = 1\n\x0cb = 2\r\nc = '\xe9'\n")
    assert Workshop(tmp_path).read("odd.py").split("\n") == [
        "odd.py lines 1-3 of 3",
        "1\ta = 1",
        "2\t\x0cb = 2",
        "3\tc = '\ufffd'",
    ]


def test_listings_and_searches_go_on_where_they_stopped(shared_tree: Path) -> None:
    shop = Workshop(shared_tree)
    assert shop.list_folder(".", count=2).split("\n")[0] == "root folder .: entries 1-2 of 5"
    assert shop.list_folder(".", start=3).split("\n")[0] == "root folder .: entries 3-5 of 5"
    assert "json/" in shop.list_folder(".")
    first = shop.search("e", "json")
    assert first.startswith("matches 1-60 of ")
    assert shop.search("e", "json", start=61).split("\n")[1] not in first


def test_what_is_handed_over_is_noted_first(shared_tree: Path) -> None:
    noted: list[str] = []
    shop = Workshop(shared_tree, noted=noted.append)
    handed = [shop.list_folder(), shop.read("bisect.py"), shop.search("^def "), shop.run(["-c", "print(6 * 7)"])]
    assert noted == handed
    assert handed[-1] == "$ python -c print(6 * 7)\n42\n\nstatus 0"
    assert shop.covered["bisect.py"] > 50


@pytest.mark.parametrize("path", ["..", "../x.py", "/etc/passwd", "json/../../x.py"])
def test_paths_outside_of_the_tree_are_refused(path: str, shared_tree: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        Workshop(shared_tree).read(path)


def test_tests_are_left_out_unless_the_whole_is_wanted(tmp_path: Path) -> None:
    for folder in ("test", "real", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("a = 1\n")
    assert Workshop(tmp_path).list_folder().split("\n")[1:] == ["real/"]
    assert Workshop(tmp_path, whole=True).list_folder().split("\n")[1:] == ["real/", "test/"]


def test_the_explorer_starts_with_the_root_and_goes_where_a_listing_leads(shared_tree: Path) -> None:
    explorer = Explorer(errands=False)
    first = complete(explorer, Request(messages=[{"role": "user", "content": "go"}]))
    assert first.finish == "calls"
    assert first.calls[0].name == "list"
    shown = "root folder .: entries 1-2 of 2\njson/\nbisect.py 300 lines"
    calls = [complete(explorer, Request(messages=[{"role": "tool", "content": shown}])).calls[0]]
    while explorer.left:
        nothing = "folder json: entries 1-0 of 0" if calls[-1].name == "list" else "matches 1-0 of 0 in json for x"
        calls.append(complete(explorer, Request(messages=[{"role": "tool", "content": nothing}])).calls[0])
    assert [call.name for call in calls] == ["search", "list", "search", "read", "read", "read"]
    assert complete(explorer, Request(messages=[{"role": "tool", "content": "x"}])).finish == "stop"


def test_a_listing_that_was_shown_in_parts_is_asked_for_again_in_smaller_ones() -> None:
    explorer = Explorer(errands=False)
    complete(explorer, Request(messages=[{"role": "user", "content": "go"}]))
    again = complete(explorer, Request(messages=[{"role": "tool", "content": "[p3, parts of 900 tokens]\nbisect.py 3 lines"}]))
    assert again.calls[0].name == "list"
    assert '"count":30' in again.calls[0].text
