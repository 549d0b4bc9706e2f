"""Every screen of the dashboard in a real browser, once: what the default run looks at. The others are in `test_browser.py`."""

from __future__ import annotations

import re

from dashboard.test_browser import PAGES, Seen, browser, seen, served  # noqa: F401


def test_every_screen_loads_without_an_error_and_nothing_from_elsewhere(seen: Seen, served: str) -> None:  # noqa: F811
    for path in PAGES.values():
        assert seen.page.goto(served + path).status == 200
        assert seen.page.locator("h1").count() == 1
        assert seen.page.title().endswith("Kilburn")
    assert {re.match(r"https?://[^/]+", url)[0] for url in seen.asked} == {served}  # type: ignore[index]
