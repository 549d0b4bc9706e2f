"""What came since a policy was last asked to its face: the new originals, calls that had to wait included.

While a call waits for its result no policy is asked, so the pages that an admission is about are not always all that
is new. This module reads a view and refuses to remember anything.
"""

from __future__ import annotations

from kilburn.policy import Cause, View

__all__ = ["arrived", "latest_step"]


def arrived(view: View) -> range:
    """Ids of the originals that are new at this admission; empty for any other cause."""
    if view.cause is not Cause.ADMIT or not view.wanted:
        return range(0)
    at = min(view.wanted)
    low = min(_opening(view, page) for page in view.wanted)
    while at > low:
        at -= 1
        low = min(low, _opening(view, at))
    return range(low, max(view.wanted) + 1)


def latest_step(view: View) -> int:
    """The first original of the step that the newest message is part of: results go with their calls' message."""
    last = max(view.wanted)
    first = last
    while first > 1 and view.page(first - 1).message == view.page(last).message:
        first -= 1
    return min(_opening(view, page) for page in range(first, last + 1))


def _opening(view: View, page: int) -> int:
    """The first page of the message that a page's call was made in, or of its own."""
    first = view.page(page).answers or page
    message = view.page(first).message
    while first > 1 and view.page(first - 1).message == message:
        first -= 1
    return first
