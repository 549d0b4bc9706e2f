"""`chat`: talk with a model whose whole past stays addressable. A session continues where it ended.

Lines come from a terminal or from a pipe. The only tools are the memory tools. Once the session contains results of tools, a
person has to confirm what the model wants to pin or remember.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from kilburn.agents.access import CallQuestion, Permit, Rights
from kilburn.agents.loop import LEARNING_POLICIES, Agent, Called, Limits, Returned, Said, Stopped
from kilburn.cli.access import Options
from kilburn.cli.model_loading import CONNECT, closing_model, detected_model, load_model, open_for_agent
from kilburn.cli.screen import cell, count, many
from kilburn.cli.shell import Db, Tenant, app
from kilburn.errors import KilburnError, ModelError, SpecError
from kilburn.model import Finish
from kilburn.terminal import line, say, tell

LEARNING_TIMEOUT = 5.0
"""Seconds to wait at the end for facts that are being learned."""

POLL_INTERVAL = 0.1
"""Seconds between two checks whether a question has expired."""

HELP = """\
/recall p17     print the exact text at an address
/search WORDS   search this session
/pin p17        keep a page in the window; /unpin lets a policy evict it
/stats          print figures of the session
/quit           leave; the session is stored"""


class ChatOptions(Options, frozen=True, kw_only=True):
    """The arguments and options of `chat`.

    Args:
        name [SESSION]: Continue this session, or create it.
        model SPEC: Talk with this model, such as "chat('gpt-5.5')", qwen or smollm2; by default, the first that can be used.
        system TEXT: Begin a new session with this system prompt.
        notes NAME: Show the model this note with each prompt; may be given several times.
        learn --learn/--no-learn: Learn facts from what you say.
        window: Keep the prompt within this many tokens, or within the model's own window if that is smaller.

    Advanced:
        policy SPEC: Let this policy choose what leaves the window (kilburn serve has cost).
        reply: Cut a reply after this many tokens.
        memory --memory/--no-memory: Offer the model tools to search and recall; for a model that takes no tools, search
            automatically.
        recall TOKENS: Add at most this many tokens of notes and known facts to each prompt; 300 by default, with --notes 1,000.
    """

    name: str = "chat"
    model: str | None = None
    system: str = ""
    notes: list[str] | None = None
    learn: bool = True
    window: int = 8000
    db: Db = None
    tenant: Tenant = None
    policy: str = "hybrid"
    reply: Annotated[int, Option(min=1)] = 512
    memory: bool = True
    recall: Annotated[int | None, Option(min=0)] = None


@app.command()
def chat(options: ChatOptions) -> None:
    """Chat with a model that can recall what left its window. The replies are streamed.

    Without --model, the first of these answers, and a line says which: OpenAI if OPENAI_API_KEY is set; Anthropic if
    ANTHROPIC_API_KEY is set; a model server on this machine, at the default port of Ollama, llama.cpp or vLLM (or one of the
    base URLs in KILBURN_MODEL_SERVERS, separated by commas). Otherwise smollm2 answers, which is downloaded once, 98 MB. It is
    too small to follow a conversation, but shows how Kilburn works.

    Lines that begin with a slash are commands to Kilburn; /help lists them. Lines may also come from a pipe. For a model that
    takes no tools, such as smollm2, Kilburn searches evicted pages for the words of each line.

    After each reply, Kilburn learns facts from your line in the background, until your next line: by rules, and with the model
    if it runs on another machine, in at most 8,000 tokens. `kilburn memories list` shows the facts, `kilburn memories state`
    failures. Kilburn adds notes, and passages about a line from memory and other sessions, to the prompt; --recall 0 turns that
    off.

    Examples:

        kilburn chat

        kilburn chat session-1 --model "chat('gpt-5.5')"

        kilburn chat --notes core/human --recall 1000

        echo "What is a drum memory?" | kilburn chat
    """
    spec = options.model or detected_model()
    if spec is None:
        spec = "smollm2"
        say(f"smollm2 answers, a model of 135 million parameters that cannot follow a conversation. For a better one, {CONNECT}")
    model = load_model(spec)
    if model is None:
        raise SpecError("a chat needs a model", advice="give --model smollm2, or kilburn models list")
    if model.context and model.context < options.window:
        say(f"the window is {count(model.context)} tokens, all that {model.name} has")
    notes, recall = options.notes or (), options.recall
    learners = LEARNING_POLICIES if getattr(model, "elsewhere", False) else LEARNING_POLICIES[0]
    with (
        closing_model(model),
        open_for_agent(
            options.db, options.tenant, model, window=options.window, policy=options.policy, reply=options.reply
        ) as store,
    ):
        agent = Agent(
            model,
            [],
            store.session(options.name),
            limits=Limits(steps=8, reply=options.reply),
            memory=options.memory,
            notes=notes,
            recall=recall if recall is not None else 1000 if notes else 300,
            learn=learners if options.learn else None,
            system=options.system,
            rights=Rights(after_untrusted=Permit.ASK),
            confirm=confirm,
        )
        try:
            _talk(agent)
        finally:
            _finish_learning(agent)


def _finish_learning(agent: Agent) -> None:
    """Wait a few seconds for facts that are being learned. A failure is reported, but is no failure of the chat."""
    if agent.learning is None:
        return
    try:
        learned = agent.learning.result(LEARNING_TIMEOUT)
        if learned.failed and learned.why:
            say(line(f"nothing could be learned yet from {' '.join(learned.failed)}: {learned.why}; the next chat tries again"))
    except (KilburnError, TimeoutError) as error:
        say(f"the next chat learns from the last messages: {error.what if isinstance(error, KilburnError) else error}")
    finally:
        agent.learning.close()


def confirm(question: CallQuestion) -> bool:
    """Ask on the terminal whether a call may run. Input from before the question is discarded. Without a terminal, the answer is
    no."""
    if not sys.stdin.isatty():
        return False
    import termios

    termios.tcflush(sys.stdin, termios.TCIFLUSH)
    say(f"{line(question.tool)} {line(question.arguments)}\n{line(question.why)}. Do it? [y/N, {question.seconds:.0f} s]")
    while not question.over.is_set():
        if select.select([sys.stdin], [], [], POLL_INTERVAL)[0]:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
    return False


def _talk(agent: Agent) -> None:
    """Answer line after line until the end of the input."""
    reported = _report_search(agent, reported=False)
    if sys.stdin.isatty():
        size = f"{line(agent.session.name)}: {many(agent.session.window.last, 'page')}"
        say(f"{size}; {agent.model.name} answers; /help, or Ctrl-D to leave")
    for typed in _lines():
        word, _, rest = typed.strip().partition(" ")
        if word in ("/quit", "/exit"):
            return
        try:
            if word.startswith("/"):
                tell(_command(agent, word, rest.strip()))
            elif word:
                _answer(agent, typed)
                reported = _report_search(agent, reported=reported)
        except KilburnError as error:
            if not sys.stdin.isatty() and isinstance(error, ModelError):
                raise
            say(f"kilburn: {error.what}{': ' + error.advice if error.advice else ''}")


def _report_search(agent: Agent, *, reported: bool) -> bool:
    """Report, once, that the model takes no tools. Return whether this is reported."""
    if agent.searches and not reported:
        say(f"{agent.model.name} takes no tools: Kilburn searches evicted pages for the words of each line")
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


def _command(agent: Agent, word: str, rest: str) -> str:
    """Run a line that begins with a slash, and return its output."""
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
        return f"{rest} is pinned"
    if word == "/unpin":
        session.unpin(rest)
        return f"{rest} is unpinned"
    if word == "/stats":
        stats = session.stats()
        use = f"{count(stats.tokens_in_window)} of {count(stats.window)} tokens in the window, {count(stats.tokens_seen)} seen"
        return f"{use}; hit rate {cell(stats.hit_rate)}, {stats.faults} faults, {stats.evictions} evictions, {stats.folds} folds"
    return HELP


def _answer(agent: Agent, typed: str) -> None:
    """Answer one line: stream the reply, and report tool calls on standard error. Ctrl-C ends the answer, not the chat."""
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
