"""`chat`: talk with a model whose whole past stays addressable; a session continues where it was left.

Lines come from a terminal or from a pipe. The only tools are the memory tools. Once the session has read what tools
returned, the model has to ask before it pins or keeps anything.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator
from typing import Annotated

from typer import Argument, Option

from kilburn.agents.access import CallQuestion, Permit, Rights
from kilburn.agents.loop import LEARNING_POLICIES, Agent, Called, Limits, Returned, Said, Stopped
from kilburn.cli.access import CONNECT, Advanced, closed_after, conversing, detected, fetched
from kilburn.cli.screen import cell, count, many
from kilburn.cli.shell import Db, Tenant, app
from kilburn.errors import KilburnError, ModelError, SpecError
from kilburn.model import Finish
from kilburn.terminal import line, say, tell

PATIENCE = 5.0
"""Seconds that the end of a chat waits for what is being learned."""

POLL = 0.1
"""Seconds after which it is looked whether a question is over."""

HELP = """\
/recall p17     the exact text at an address
/search WORDS   passages of this session
/pin p17        keep a page in the window; /unpin lets it go
/stats          the ledger's figures
/quit           leave; the session stays"""


@app.command()
def chat(
    name: Annotated[str, Argument(metavar="SESSION", help="The session, made or gone on with.")] = "chat",
    model: Annotated[
        str | None,
        Option(
            metavar="SPEC",
            help="Talk with this model, such as \"chat('gpt-5.5')\", qwen or smollm2; by default, the first that can be used.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str, Option(metavar="TEXT", help="Begin a new session with this system prompt.")] = "",
    notes: Annotated[
        list[str] | None,
        Option("--notes", metavar="NAME", help="Show the model this note with each prompt; may be given several times."),
    ] = None,
    learn: Annotated[bool, Option("--learn/--no-learn", help="Learn facts from what you say.")] = True,
    window: Annotated[
        int, Option(help="Keep the prompt within this many tokens, or within the model's own window if that is smaller.")
    ] = 8000,
    db: Db = None,
    tenant: Tenant = None,
    policy: Annotated[
        str, Advanced(metavar="SPEC", help="Let this policy choose what leaves the window (kilburn serve has cost).")
    ] = "hybrid",
    reply: Annotated[int, Advanced(min=1, help="Cut a reply after this many tokens.")] = 512,
    memory: Annotated[
        bool,
        Advanced(
            "--memory/--no-memory",
            help="Offer the model tools to search and recall; for a model that takes no tools, search automatically.",
        ),
    ] = True,
    recall: Annotated[
        int | None,
        Advanced(
            min=0,
            metavar="TOKENS",
            help="Add at most this many tokens of notes and known facts to each prompt; 300 by default, with --notes 1,000.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Talk with a model; its replies stream, and it can recall whatever left its window.

    Without --model, the first of these answers, and a line says which: OpenAI if OPENAI_API_KEY is set; Anthropic if
    ANTHROPIC_API_KEY is set; a model server on this machine, at the default port of Ollama, llama.cpp or vLLM (or one of the
    base URLs in KILBURN_MODEL_SERVERS, separated by commas). Otherwise smollm2 answers, which is downloaded once, 98 MB. It is
    too small to follow a conversation, but shows how Kilburn works.

    Lines that begin with a slash are commands to Kilburn; /help lists them. Lines may also come from a pipe. For a model that
    takes no tools, such as smollm2, what has left the window is searched for the words of each line.

    What you say is learned from after each reply, in the background: by rules, and by a model that answers on another machine, in
    at most 8,000 tokens, until your next line. `kilburn memories list` shows what, `kilburn memories state` what failed and why.
    Notes, and what memory and other sessions say about a line, go with it to the model; --recall 0 turns that off.

    Examples:

        kilburn chat

        kilburn chat session-1 --model "chat('gpt-5.5')"

        kilburn chat --notes core/human --recall 1000

        echo "What is a drum memory?" | kilburn chat
    """
    spec = model or detected()
    if spec is None:
        spec = "smollm2"
        say(f"smollm2 answers, a model of 135 million parameters that cannot follow a conversation. For a better one, {CONNECT}")
    speaker = fetched(spec)
    if speaker is None:
        raise SpecError("a chat needs a model", advice="give --model smollm2, or kilburn models list")
    if speaker.context and speaker.context < window:
        say(f"the window is {count(speaker.context)} tokens, all that {speaker.name} has")
    with (
        closed_after(speaker),
        conversing(db, tenant, speaker, window=window, policy=policy, reply=reply) as store,
    ):
        agent = Agent(
            speaker,
            [],
            store.session(name),
            limits=Limits(steps=8, reply=reply),
            memory=memory,
            notes=notes or (),
            recall=recall if recall is not None else 1000 if notes else 300,
            learn=(LEARNING_POLICIES if getattr(speaker, "elsewhere", False) else LEARNING_POLICIES[0]) if learn else None,
            system=system,
            rights=Rights(after_untrusted=Permit.ASK),
            confirm=confirm,
        )
        try:
            _talk(agent)
        finally:
            _learned(agent)


def _learned(agent: Agent) -> None:
    """Wait a little for what is being learned. That it failed is said, and no failure of the chat."""
    if agent.learning is None:
        return
    try:
        learned = agent.learning.result(PATIENCE)
        if learned.failed and learned.why:
            say(line(f"nothing could be learned yet from {' '.join(learned.failed)}: {learned.why}; it is tried again"))
    except (KilburnError, TimeoutError) as error:
        say(f"what was said last is learned from the next time: {error.what if isinstance(error, KilburnError) else error}")
    finally:
        agent.learning.close()


def confirm(question: CallQuestion) -> bool:
    """Ask on the terminal whether a call may be carried out. What was typed before the question is no answer to it, and
    where there is no terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    import termios

    termios.tcflush(sys.stdin, termios.TCIFLUSH)
    say(f"{line(question.tool)} {line(question.arguments)}\n{line(question.why)}. Do it? [y/N, {question.seconds:.0f} s]")
    while not question.over.is_set():
        if select.select([sys.stdin], [], [], POLL)[0]:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
    return False


def _talk(agent: Agent) -> None:
    """Line after line, until there are none."""
    told = _told(agent, told=False)
    if sys.stdin.isatty():
        held = f"{line(agent.session.name)}: {many(agent.session.window.last, 'page')}"
        say(f"{held}; {agent.model.name} answers; /help, or Ctrl-D to leave")
    for typed in _lines():
        word, _, rest = typed.strip().partition(" ")
        if word in ("/quit", "/exit"):
            return
        try:
            if word.startswith("/"):
                tell(_own(agent, word, rest.strip()))
            elif word:
                _answer(agent, typed)
                told = _told(agent, told=told)
        except KilburnError as error:
            if not sys.stdin.isatty() and isinstance(error, ModelError):
                raise
            say(f"kilburn: {error.what}{': ' + error.advice if error.advice else ''}")


def _told(agent: Agent, *, told: bool) -> bool:
    """Say, once, that the model takes no tools; whether it was said."""
    if agent.searches and not told:
        say(f"{agent.model.name} takes no tools: what has left the window is searched for the words of each line")
    return agent.searches


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (typed.rstrip("\n") for typed in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            tell()
            return


def _own(agent: Agent, word: str, rest: str) -> str:
    """Carry out a line that begins with a slash."""
    session = agent.session
    if word == "/recall":
        return session.recall(rest)
    if word == "/search":
        return (
            "\n".join(f"{hit.address} ({line(hit.origin)}): {hit.text.strip()}" for hit in session.search(rest))
            or "nothing found"
        )
    if word == "/pin":
        session.pin(rest)
        return f"{rest} stays"
    if word == "/unpin":
        session.unpin(rest)
        return f"{rest} may go"
    if word == "/stats":
        stats = session.stats()
        used = f"{count(stats.tokens_in_window)} of {count(stats.window)} tokens in the window, {count(stats.tokens_seen)} seen"
        return f"{used}; hit rate {cell(stats.hit_rate)}, {stats.faults} faults, {stats.evictions} evictions, {stats.folds} folds"
    return HELP


def _answer(agent: Agent, typed: str) -> None:
    """One turn: the reply as it comes, tool calls on standard error. Ctrl-C ends the turn, not the chat."""
    events = agent.stream(typed)
    try:
        for event in events:
            if isinstance(event, Said):
                tell("" if event.reasoning else event.text, end="")
                sys.stdout.flush()
            elif isinstance(event, Called):
                say(f"[{line(event.name)} {event.arguments}]")
            elif isinstance(event, Returned):
                say(f"[{'failed' if event.failed else 'back'}: {count(len(event.text))} characters]")
            elif isinstance(event, Stopped) and event.outcome.finish not in (Finish.STOP, Finish.LENGTH):
                say(f"[stopped: {event.outcome.finish}]")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        say("[interrupted]")
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    tell()
