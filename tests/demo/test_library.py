"""The demo's tools, and the explorer that calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kilburn.demo.explorer import Explorer
from kilburn.demo.library import Library
from kilburn.model import Request, complete


def test_a_read_shows_numbered_lines_and_how_many_there_are(shared_tree: Path) -> None:
    lines = (shared_tree / "textwrap.py").read_text().split("\n")[:-1]
    shown = Library(shared_tree).read("textwrap.py", start=3, count=2)
    assert shown == f"textwrap.py lines 3-4 of {len(lines)}\n3\t{lines[2]}\n4\t{lines[3]}"


def test_a_form_feed_or_a_carriage_return_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(b"a = 1\n\x0cb = 2\r\nc = '\xe9'\n")
    assert Library(tmp_path).read("odd.py").split("\n") == [
        "odd.py lines 1-3 of 3",
        "1\ta = 1",
        "2\t\x0cb = 2",
        "3\tc = '\ufffd'",
    ]


def test_listings_and_searches_go_on_where_they_stopped(shared_tree: Path) -> None:
    library = Library(shared_tree)
    assert library.list_folder(".", count=2).split("\n")[0] == "folder . entries 1-2 of 5"
    assert library.list_folder(".", start=3).split("\n")[0] == "folder . entries 3-5 of 5"
    assert "json/" in library.list_folder(".")
    first = library.search("e", "json")
    assert first.startswith("json matches 1-60 of ")
    assert library.search("e", "json", start=61).split("\n")[1] not in first


def test_what_was_read_is_known(shared_tree: Path) -> None:
    library = Library(shared_tree)
    library.read("bisect.py")
    library.read("bisect.py", start=11, count=10)
    assert library.covered == {"bisect.py": 60}


@pytest.mark.parametrize("path", ["..", "../x.py", "/etc/passwd", "json/../../x.py"])
def test_paths_outside_of_the_tree_are_refused(path: str, shared_tree: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        Library(shared_tree).read(path)


def test_tests_are_left_out_unless_the_whole_is_wanted(tmp_path: Path) -> None:
    for folder in ("test", "real", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("a = 1\n")
    assert Library(tmp_path).list_folder().split("\n")[1:] == ["real/"]
    assert Library(tmp_path, whole=True).list_folder().split("\n")[1:] == ["real/", "test/"]


def asked(explorer: Explorer, shown: str) -> tuple[str, dict[str, Any]]:
    reply = complete(explorer, Request(messages=[{"role": "tool", "content": shown}]))
    assert reply.finish == "calls"
    return reply.calls[0].name or "", json.loads(reply.calls[0].text)


def test_the_explorer_goes_where_a_listing_leads() -> None:
    explorer = Explorer()
    assert asked(explorer, "go")[0] == "list"
    assert asked(explorer, "folder . entries 1-2 of 3\njson/\nbisect.py 200 lines") == (
        "list",
        {"path": ".", "start": 3, "count": 40},
    )
    calls = [
        asked(explorer, "folder . entries 3-3 of 3\na file.py 7 lines"),
        asked(explorer, "bisect.py lines 1-120 of 200\n..."),
        asked(explorer, "..."),
        asked(explorer, "a file.py lines 1-7 of 7\n..."),
        asked(explorer, "folder json entries 1-0 of 0"),
        asked(explorer, ". matches 1-1 of 1\nbisect.py 5: def bisect():"),
    ]
    assert [(name, arguments["path"]) for name, arguments in calls] == [
        ("read", "bisect.py"),
        ("read", "bisect.py"),
        ("read", "a file.py"),
        ("list", "json"),
        ("search", "."),
        ("search", "json"),
    ]
    assert explorer.files == {"bisect.py": 200, "a file.py": 7}
    assert complete(explorer, Request(messages=[{"role": "tool", "content": "json matches 1-0 of 0"}])).finish == "stop"


def test_a_listing_that_was_shown_in_parts_is_asked_for_again_in_smaller_ones() -> None:
    explorer = Explorer()
    asked(explorer, "go")
    for shown in ("[p3, parts of 900 tokens]\nbisect.py 3 lines", "folder . entries 1-2 of 2\n...\nbisect.py 3 lines\n..."):
        name, arguments = asked(explorer, shown)
        assert (name, arguments["path"], arguments["start"]) == ("list", ".", 1)
    assert arguments["count"] == 10
