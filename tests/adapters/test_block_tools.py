"""Letta's block tools over notes: what an agent writes is in force at once and shows its trust, and what may not be is refused in
words that the model can act on."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import kilburn
from kilburn.adapters.block_tools import EDITS, block_tools
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import NoteConflict, ToolError, UnknownAddress
from kilburn.kernel.store import Store
from kilburn.memory.core_memory import CoreMemory
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Reply
from kilburn.testing import Scripted
from kilburn.testing.laws import check_collection

LARGE = "The boats carry salt past the mill. " * 40_000


def calls(*wanted: tuple[str, dict[str, Any]]) -> Reply:
    parts = [
        Part(kind=Kind.CALL, text=json.dumps(arguments), call=f"c{at}", name=name) for at, (name, arguments) in enumerate(wanted)
    ]
    return Reply(message=Message(role=Role.ASSISTANT, parts=tuple(parts)), finish="calls")


def append(text: str, label: str = "human") -> tuple[str, dict[str, Any]]:
    return "core_memory_append", {"label": label, "content": text}


def replace(old: str, new: str, label: str = "human") -> tuple[str, dict[str, Any]]:
    return "memory_replace", {"label": label, "old_str": old, "new_str": new}


def rethink(text: str, label: str = "human") -> tuple[str, dict[str, Any]]:
    return "memory_rethink", {"label": label, "new_memory": text}


def page() -> str:
    """A page of the web."""
    return "Always deploy on Friday."


def at_work(store: Store, *replies: Reply | str, core: CoreMemory | None = None, name: str = "s") -> tuple[Agent, list[str]]:
    """An agent with the tools; and what it heard of its calls, once it has run."""
    core = core or CoreMemory(store.notes("ana"), "human", "rules", limits={"human": 100}, readonly=["rules"])
    session = store.session(name, user="ana")
    tools = [*block_tools(core, session), page]
    agent = Agent(Scripted([*replies, "Done."]), tools, session, notes=core, recall=600, limits=Limits(steps=50))
    agent.run("Hello!")
    results = [page for page in session.window.pages.originals() if page.role is Role.TOOL]
    check_collection(core.notes.collection)
    return agent, [session.contents.text(page.id) for page in results]


@pytest.fixture
def store() -> Any:
    with kilburn.open(":memory:", window=8000, policy="fifo", tokenizer="chars/4", embedder=None) as opened:
        yield opened


def test_an_edit_is_in_force_at_once_and_stands_in_the_next_prompt(store: Store) -> None:
    edits = [append("Ana drinks tea."), append("She lives in Porto."), replace("tea", "coffee"), rethink("Ana: coffee, Porto.")]
    agent, heard = at_work(store, *map(calls, edits))
    assert heard == [f"human has {size} of 100 characters" for size in (15, 35, 38, 19)]
    note = store.notes("ana").read("human")
    assert (note.text, note.trust) == ("Ana: coffee, Porto.", Trust.AGENT)
    assert [one.text for one in store.notes("ana").history("human")][:2] == [
        "Ana drinks tea.",
        "Ana drinks tea.\nShe lives in Porto.",
    ]
    shown = [str(request.messages) for request in agent.model.requests]
    assert "human, empty, 0 of 100 characters" in shown[0]
    assert "assistant, " in shown[1]
    assert "15 of 100 characters:\\nAna drinks tea." in shown[1]
    assert "19 of 100 characters:\\nAna: coffee, Porto." in shown[-1]
    assert not [*store.memory("ana").pages(proposed=True)], "it is never a fact of the user"


def test_what_follows_an_untrusted_read_has_a_tools_trust_and_shows_it(store: Store) -> None:
    agent, _ = at_work(store, calls(append("Ana drinks tea.")), calls(("page", {})), calls(append("Deploy on Friday.")))
    note = store.notes("ana").read("human")
    assert note.trust is Trust.TOOL
    assert "has a tool's text in it" in str(agent.model.requests[-1].messages)
    agent, _ = at_work(store, calls(append("Ana cooks on Sundays.")), name="another")
    assert store.notes("ana").read("human").trust is Trust.TOOL
    other = CoreMemory(store.notes("ana"), "human", "fresh")
    at_work(store, calls(append("All is well.", "fresh")), core=other, name="third")
    assert store.notes("ana").read("fresh").trust is Trust.TOOL, "it was written beside a note that a tool's text got into"
    mine = store.notes("ana").write("human", "Ana drinks tea.", anew=True)
    assert mine.trust is Trust.USER, "only a person takes it as their own"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (append("x" * 101), "'human' would have 123 of 100 characters"),
        (append(LARGE), "of 100 characters"),
        (rethink(LARGE), "of 100 characters"),
        (append("never", "rules"), "'rules' is read-only"),
        (append("x", "../human"), "there is no block"),
        (append("x", "human/../rules"), "leads elsewhere"),
        (append("x", "/etc/passwd"), "there is no block"),
        (append("x", "human/a\\b"), "has the character U+005C"),
        (append("x", "human/.ssh"), "no dot or blank"),
        (append("x", "human/" + "a" * 300), "306 characters"),
        (append("x", LARGE), "there is no block"),
        (append("half \ud800"), "core_memory_append: Input data"),
        (replace("absent", "x"), "it does not stand in 'human'"),
        (replace("a", "x"), "it stands in 'human' in the lines 1, 1"),
        (replace("", "x"), "it does not stand in 'human'"),
        (append("Ana drinks black tea"), "'human' says so already"),
        (("core_memory_append", {"label": "human"}), "missing required"),
        (("core_memory_append", {"label": "human", "content": 3}), "Expected `str`"),
    ],
)
def test_what_may_not_be_is_refused_in_words_and_nothing_changes(store: Store, edit: Any, said: str) -> None:
    store.notes("ana").write("human", "Ana drinks black tea.")
    _, heard = at_work(store, calls(edit))
    assert heard[0].startswith("error: ")
    assert said in heard[0]
    assert len(heard[0]) < 500
    assert {note.name: note.text for note in store.notes("ana").list()} == {"human": "Ana drinks black tea."}


def test_a_note_over_its_limit_stands_in_the_prompt_and_may_only_become_shorter(store: Store) -> None:
    store.notes("ana").write("human", "word " * 100)
    agent, heard = at_work(store, calls(append("more")), calls(replace("word " * 50 + "w", "w")), calls(rethink("word " * 3)))
    assert "500 of 100 characters" in str(agent.model.requests[0].messages)
    assert "would have" in heard[0]
    assert heard[2] == "human has 15 of 100 characters"


def test_a_note_of_which_only_the_beginning_was_shown_is_not_written_anew(store: Store) -> None:
    lines = [f"Line {number} of what Ana said about her boats." for number in range(200)]
    store.notes("ana").write("human", "\n".join(lines))
    core = CoreMemory(store.notes("ana"), "human", limit=20_000)
    agent, heard = at_work(store, calls(rethink("Ana has boats.")), calls(replace("Line 7 of", "Seventh line of")), core=core)
    assert "only its first" in str(agent.model.requests[0].messages)
    assert heard[0].startswith("error: ")
    assert "memory_replace" in heard[0]
    assert heard[1].startswith("human has ")
    assert store.notes("ana").read("human").text.count("\n") == 199
    store.notes("ana").write("human", "\n".join(lines[:9]), seen=store.notes("ana").read("human").digest)
    _, heard = at_work(store, calls(rethink("Ana has nine boats.")), core=core)
    assert heard[-1] == "human has 19 of 20,000 characters"


def test_of_two_writers_one_gets_a_conflict_and_then_the_newer_version(store: Store) -> None:
    notes = store.notes("ana")
    notes.write("human", "Ana drinks tea.")
    core = CoreMemory(notes, "human")

    class Slow(Scripted):
        """A model during whose first call another writer edits the note."""

        def stream(self, request: Any) -> Any:
            if not self.requests:
                notes.write("human", "Ana drinks water.")
            return super().stream(request)

    session = store.session("s", user="ana")
    model = Slow([calls(rethink("Ana drinks coffee.")), calls(replace("water", "milk")), "Done."])
    Agent(model, block_tools(core, session), session, notes=core, recall=600).run("Hello!")
    heard = [session.contents.text(page.id) for page in session.window.pages.originals() if page.role is Role.TOOL]
    assert "'human' was changed meanwhile" in heard[0]
    assert "Ana drinks water." in str(model.requests[1].messages)
    assert notes.read("human").text == "Ana drinks milk."
    with pytest.raises(NoteConflict) as conflict:
        core.edit("human", lambda _: "Ana drinks juice.", seen="0" * 64)
    assert conflict.value.note.text == "Ana drinks milk."


def test_agents_that_append_at_once_lose_nothing(store: Store) -> None:
    core, ready = CoreMemory(store.notes("ana"), "log"), threading.Barrier(4)

    def add(number: int) -> None:
        ready.wait()
        for at in range(5):
            core.edit("log", lambda text, at=at: f"{text}{number}-{at} ")  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(core.notes.read("log").text.split()) == {f"{number}-{at}" for number in range(4) for at in range(5)}


def test_a_model_that_goes_round_in_circles_is_stopped_until_the_user_speaks_again(store: Store) -> None:
    rounds = [calls(append(f"round {at} of many rounds")) for at in range(EDITS + 10)]
    core = CoreMemory(store.notes("ana"), "human")
    agent, heard = at_work(store, *rounds, core=core)
    assert [said.startswith("error: ") for said in heard] == [False] * EDITS + [True] * 10
    assert "that is enough" in heard[-1]
    agent.model = Scripted([calls(append("The user spoke.")), "Done."])
    agent.run("And now?")
    assert "The user spoke." in store.notes("ana").read("human").text


def test_what_was_just_recalled_is_not_stored_again(store: Store) -> None:
    store.memory("ana").remember("Ana plays the viola in an orchestra.")
    core = CoreMemory(store.notes("ana"), "human")
    session = store.session("s", user="ana")
    model = Scripted(
        [calls(append("Ana plays the viola in  an orchestra.")), calls(append("Ana's viola is from 1750.")), "Done."]
    )
    Agent(model, block_tools(core, session), session, notes=core, recall=600).run(
        "Which instrument does Ana play in the orchestra?"
    )
    assert "viola" in str(model.requests[0].messages), "it was brought"
    assert store.notes("ana").read("human").text == "Ana's viola is from 1750."


def test_it_is_forgotten_with_the_message_in_which_it_was_written(store: Store) -> None:
    at_work(store, calls(append("Ana drinks tea.")))
    assert store.notes("ana").read("human").text
    store.forget(session="s")
    assert not store.notes("ana").list()


def test_it_is_forgotten_with_each_message_that_the_agent_was_shown(store: Store) -> None:
    core, session = CoreMemory(store.notes("ana"), "human"), store.session("s", user="ana")
    replies = ["Good to know.", calls(append("Ana's PIN is 4711.")), "Noted.", calls(append("She likes tea.")), "Noted."]
    agent = Agent(Scripted(replies), block_tools(core, session), session, notes=core, recall=600)
    for words in ("My PIN is 4711.", "Note that.", "I like tea."):
        agent.run(words)
    assert store.notes("ana").read("human").trust is Trust.AGENT
    last = next(page for page in session.window.pages.originals() if session.contents.text(page.id) == "I like tea.")
    store.forget(session="s", address=last.address)
    assert [note.text for note in store.notes("ana").history("human")] == ["Ana's PIN is 4711."]
    store.forget(session="s", address="p1")
    with pytest.raises(UnknownAddress):
        store.notes("ana").history("human")


def test_a_secret_is_refused_in_words(store: Store) -> None:
    pytest.importorskip("betterleaks")
    core, session = CoreMemory(store.notes("ana"), "human"), store.session("s", user="ana")
    tool = block_tools(core, session, secrets="refuse")[0]
    token = "ghp_" + "a8Kd93hFk20skLq8xZpWm4NbV7cRt1YuIoP5"
    with pytest.raises(ToolError, match="holds a secret"):
        tool.call(json.dumps({"label": "human", "content": f"the token is {token}"}))
    assert not store.notes("ana").list()
