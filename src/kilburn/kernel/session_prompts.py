"""The prompts of a session: their size, the counter that measures them, and what providers report of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from kilburn.arguments import checked
from kilburn.budget import Budget, counts_alike, repriced
from kilburn.errors import Forgotten
from kilburn.event import Act, Data
from kilburn.kernel.drive import run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.planning import Planner
from kilburn.kernel.prompts import Prompts
from kilburn.kernel.render import Prompt
from kilburn.kernel.session_edits import take_back
from kilburn.kernel.window import GONE, WindowState
from kilburn.message import TRUST_OF_ROLE, Message, Role
from kilburn.model import Tokens, is_count
from kilburn.move import Drop
from kilburn.page import Place
from kilburn.policy import Cause
from kilburn.tokens.calibrated import is_plausible

if TYPE_CHECKING:
    from kilburn.kernel.session import Session
else:
    # `checked` reads the annotations, and a session makes this.
    Session = object


@checked
class SessionPrompts:
    """How large the prompts of a session may be and are, and how their tokens are counted."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def budget(self) -> Budget:
        """What its window may hold."""
        return self._session._kernel.budget

    @property
    def capacity(self) -> int:
        """Tokens that the pages of a prompt may take: the budget's, corrected by what providers reported."""
        with self._session.lock:
            return self._session._kernel.capacity

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now."""
        with self._session.lock:
            return self._session._kernel.window.use

    @property
    def excess(self) -> int:
        """Tokens over the capacity: 0, unless the session was opened with a smaller window than its pins, and its calls that
        wait for results, need. Then it can be read and mended, by `unpin`, `forget` or a larger window; `render` and `append`
        raise `PinsExceedWindow`."""
        with self._session.lock:
            return self._session._kernel.excess

    @property
    def last_room(self) -> int | None:
        """Tokens, by the session's own counter, that the pages of the last prompt might take (`Stats.room`); None before the
        first prompt."""
        with self._session.lock:
            return self._session._kernel.ledger.stats.room or None

    def render_from(
        self,
        turn: int,
        messages: Sequence[Message] = (),
        format: str = "chat",
        *,
        request: Mapping[str, str] | None = None,
    ) -> Prompt:
        """The prompt as it was after a turn, with these messages behind it, and without what came since: what has left the window
        by now is in it, and what is forgotten or retired by now is not. Nothing is appended or moved, and no policy is asked.

        Raises:
            What `append` raises.
        """
        with kernel_of(self._session, turn, messages) as past:
            past.unsigned_to = self._session._kernel.unsigned_to
            return Prompts(past).render(format, request_data(request) | {"turn": turn})

    def leave_out_reasoning(self) -> bool:
        """Leave out of prompts, from now on, the reasoning and the signatures of what was said so far: the provider, or another
        model, refuses them. What is said later keeps its own. A session that is opened again begins anew.

        Returns:
            Whether prompts had any that was not left out yet.
        """
        with self._session.lock:
            kernel = self._session._kernel
            last_unsigned, kernel.unsigned_to = kernel.unsigned_to, kernel.window.last
            return any(page.role is Role.ASSISTANT and page.id > last_unsigned and page.extra for page in kernel.window.visible())

    def sent_whole(self, *, request: Mapping[str, str] | None = None) -> None:
        """Record that everything appended so far was sent to a model as it came, where nothing has left the window: a prompt
        that need not be rendered. If the store was opened for reading, nothing happens. `request` is that of `render`."""
        with self._session.lock:
            if not self._session.backend.readonly:
                self._session._prompts.sent_whole(request_data(request))

    def observe(self, usage: Tokens, counted: int) -> bool:
        """Report what a provider says that a prompt cost, which was counted here as `counted` tokens.

        If our count was too low, the window shrinks accordingly, at once, without asking a model. Impossible numbers
        change nothing; the ledger records that they came.

        Returns:
            Whether the numbers are plausible.
        """
        kernel = self._session._kernel
        with kernel.lock:
            if not (is_count(counted) and usage.sound and is_plausible(counted, usage.prompt)):
                kernel.observe(Act.NOTE, why="a provider's count of a prompt cannot be true")
                return False
            kernel.note_counter()
            kernel.observe(Act.USAGE, counted=counted, prompt=usage.prompt, cached=usage.cached, reply=usage.reply)
            if kernel.excess:
                run(self._session._settling(tuple, Cause.PRESSURE, waits=False), self._session._answer)
            return True

    def count_for(self, model: str) -> None:
        """Count by the tokenizer of the model that a prompt is for; the pages are counted again if it is another one. A store
        that was opened with a tokenizer of its own, or with a model, counts by that: then nothing happens.

        Args:
            model: as a request names it.

        Raises:
            StoreError: the session cannot be read.
        """
        with self._session.lock:
            counter = self._session._home.counter_of(model)
            if counter is None or counts_alike(counter, self._session.counter):
                return
            self._session.ledger.refresh()
            self._session._set_counter(counter)
            self._session._renewed()

    def price_attachments_for(self, model: str) -> None:
        """Price the attachments that are appended from now on by the rules of the model that a prompt is for; text is counted as
        before. A store that was opened with a tokenizer of its own, or with a model, prices them by that.

        Args:
            model: as a request names it.
        """
        with self._session.lock:
            counter = self._session._home.counter_of(model)
            family = getattr(counter, "family", "")
            if counter is not None and family != getattr(self._session.counter, "family", ""):
                self._session.counter = repriced(self._session.counter, family=family)
                self._session._kernel.set_counter(self._session.counter)


@contextmanager
def kernel_of(session: Session, turn: int | None = None, messages: Sequence[Message] = ()) -> Iterator[Kernel]:
    """The kernel of a session, locked and up to date; or as it was after a turn, with these messages behind it, and without what
    is forgotten or retired by now. That one is to be looked at: of what happens in the block only observations are kept.

    Raises:
        StoreStale: another writer went on while changes here are not written. Of a turn, also what `append` raises.
    """
    with session._current() as kernel:
        if turn is None:
            yield kernel
            return
        past = kernel.as_of(session._last_of(turn))
        with past.batch(undone=True):
            _leave_out(past, session.window)
            if messages:
                past.take_in([_said_then(message, past.window, session.window) for message in messages])
            Planner(past, session._planner.policy, session._planner.name).enforce()
            yield past
        kernel.take_over(past.pending.events)


def _leave_out(past: Kernel, present: WindowState) -> None:
    """Forget and retire in an earlier state, inside the current batch, what is forgotten and retired by now."""
    window = past.window
    removed = [page for page in present.gone if page in window.states and window.at(page) not in GONE]
    if dropped := [page for page in removed if present.at(page) is Place.DROPPED]:
        past.carry(Drop(pages=tuple(dropped)))
    take_back(past, (page for page in removed if present.at(page) is Place.RETIRED))


def _said_then(message: Message, past: WindowState, present: WindowState) -> Message:
    """A message of now as it can stand in an earlier state: pages that came since, from which it was made, are none there. It
    is believed no more than they are.

    Raises:
        Forgotten: such a page is.
    """
    later = [source for source in message.sources if source not in past.pages and source in present.pages]
    if not later:
        return message
    if any(present.at(page) is Place.DROPPED for page in later):
        raise Forgotten("a page of which this was made was forgotten", advice="make it anew")
    own_trust = TRUST_OF_ROLE[message.role] if message.trust is None else message.trust
    trust = min([own_trust, *(present.pages[page].trust for page in later)])
    sources = tuple(source for source in message.sources if source not in later)
    return msgspec.structs.replace(message, sources=sources, trust=trust)


def request_data(request: Mapping[str, str] | None) -> Data:
    """Return the data of an event that names the request for which a prompt was made."""
    return {"request": dict(request)} if request else {}
