"""`ask`: a question about texts of any length, answered by a model that reads them by code."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

import kilburn
from kilburn.agents.loop import MAX_CALLS, MAX_SECONDS, MAX_TOKENS, UNLIMITED, Called, Limits, Returned
from kilburn.budget import Budget
from kilburn.cli.access import CONNECT, WIDE, Advanced, closed_after, conversing, detected, model_of
from kilburn.cli.screen import Done, count, many, progress
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import ModelError, SpecError
from kilburn.kernel.store import Store
from kilburn.models.weights import catalogue
from kilburn.prices import prices_of
from kilburn.recursion.answer import AnswerOutcome, SubCalled
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult, replay, resume
from kilburn.recursion.variable import Source, read_files
from kilburn.terminal import line, say, tell

WRONG = (AnswerOutcome.UNREADY, AnswerOutcome.NOTHING)
"""Outcomes without an answer: exit status 1."""

MIN_PARAMETERS = 400_000_000
"""The smallest model that may write the code. SmolLM2 with 135 million gave no answer in 250 seconds."""

STDIN = Path("-")
MOST = 1 << 28
"""Bytes that are read from standard input, at most, because it may have no end: three times as many tokens as a run may spend."""


@app.command()
def ask(
    files: Annotated[list[Path] | None, Argument(metavar="FILE", help="Files and folders to read; - for standard input.")] = None,
    question: Annotated[str, Option(metavar="TEXT", help="Ask this question.")] = "",
    model: Annotated[
        str,
        Option(
            metavar="SPEC",
            help="Let this model write the code, such as \"chat('gpt-5.5')\"; by default, the first that can be used.",
            show_default=False,
        ),
    ] = "",
    sub_model: Annotated[
        str,
        Option(
            metavar="SPEC",
            help="Let this model answer the questions that the code asks; by default the same.",
            show_default=False,
        ),
    ] = "",
    past: Annotated[bool, Option("--past", help="Let the code read the sessions of the store.")] = False,
    session: Annotated[str, Option(metavar="NAME", help="Record the run in this session.")] = "ask",
    goes_on: Annotated[bool, Option("--resume", help="Continue the session's last question where it was cut off.")] = False,
    tokens: Annotated[
        int | None,
        Option(min=0, help="Stop after this many tokens, prompts and replies together.", show_default=f"{MAX_TOKENS:,}"),
    ] = None,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
    recorded: Annotated[bool, Advanced("--replay", help="Run the session's last question again, without a model.")] = False,
    depth: Annotated[
        int,
        Advanced(
            min=0, help="Let the code ask a model (1), start runs of its own on pieces of the text (2 or more), or neither (0)."
        ),
    ] = 1,
    steps: Annotated[
        int | None, Advanced(min=0, help="Stop after this many replies of the model that writes the code.", show_default="30")
    ] = None,
    calls: Annotated[
        int | None, Advanced(min=0, help="Stop after this many replies of all models together.", show_default=f"{MAX_CALLS:,}")
    ] = None,
    seconds: Annotated[
        float | None, Advanced(min=0, help="Stop after this many seconds.", show_default=f"{MAX_SECONDS:,.0f}")
    ] = None,
    money: Annotated[
        float | None,
        Advanced(
            min=0,
            help="Stop after this much money, by --prices.",
            show_default=f"what {MAX_TOKENS:,} fresh tokens cost: 60 if hosted",
        ),
    ] = None,
    no_limits: Annotated[bool, Advanced("--no-limits", help="Apply no limits but those that are given.")] = False,
    prices: Annotated[
        str | None,
        Advanced(metavar="NAME", help="Count money by this price list: hosted, automatic or local.", show_default="hosted"),
    ] = None,
    window: Annotated[
        int, Advanced(help="Keep the prompt within this many tokens, or within the model's own window if that is smaller.")
    ] = 8000,
    policy: Annotated[str, Advanced(metavar="SPEC", help="Let this policy choose what leaves the window.")] = "hybrid",
    reply: Annotated[int | None, Advanced(min=1, help="Cut a reply after this many tokens.", show_default="1024")] = None,
    parallel: Annotated[int, Advanced(min=1, help="Ask this many models at the same time.")] = 4,
    sandbox: Annotated[str, Advanced(metavar="NAME", help="Run the code in this sandbox: auto, cpython or monty.")] = "auto",
    no_tools: Annotated[
        bool, Advanced("--no-tools", help="Offer no tools even to a model that takes them: it writes its code in fenced blocks.")
    ] = False,
) -> None:
    """Ask about files that are larger than any window: the model reads them by code, in a sandbox.

    The text is a variable there. The model sees its size, its beginning and what its code prints. Its code may ask a model
    about pieces of the text. Every step is a page of the session, and the run can be run again with --replay. A run that was
    cut off goes on with --resume, and asks nothing twice; its limits hold on, but for those that are given anew. So does a run
    that a limit ended without an answer, if this limit is given anew and is higher.

    Without --model, the first of these writes the code, and a line says which: OpenAI if OPENAI_API_KEY is set; Anthropic if
    ANTHROPIC_API_KEY is set; a model server on this machine, at the default port of Ollama, llama.cpp or vLLM (or one of the
    base URLs in KILBURN_MODEL_SERVERS, separated by commas). A model that takes no tools writes its code in fenced blocks.

    The exit status is 1 if there is no answer.

    Examples:

        kilburn ask report.txt notes/ --question "Which suppliers were late twice?"

        echo "Besra came late on Monday and on Friday." | kilburn ask - --question "Who was late twice?" --model "chat('gpt-5.5')"

        kilburn ask --past --question "What did I decide about the parser?" --model "chat('gpt-5.5')" --sub-model qwen
    """
    if not files and not past:
        raise SpecError("nothing to ask about", advice="give files or folders, or --past")
    if recorded and goes_on:
        raise SpecError("--replay and --resume", advice="use one of them")
    if not (question or recorded or goes_on):
        raise SpecError("there is no question", advice="give --question TEXT")
    spec = None if recorded else _coder(model)
    source = _source(files or [])
    asked = {"steps": steps, "calls": calls, "tokens": tokens, "seconds": seconds, "money": money, "reply": reply}
    given: dict[str, Any] = {name: most for name, most in asked.items() if most is not None}
    if no_limits:
        given = {name: getattr(UNLIMITED, name) for name in ("steps", "calls", "tokens", "seconds", "money")} | given
    if prices or not goes_on:
        given["prices"] = prices_of(prices or "hosted")
    with ExitStack() as open_until:
        root = open_until.enter_context(closed_after(model_of(spec)))
        if spec is not None:
            _check_size(root.name, getattr(root, "parameters", 0))
        sub = open_until.enter_context(closed_after(model_of(sub_model) if sub_model and not recorded else None))
        opened = conversing(db, tenant, root, window=window, policy=policy, reply=reply or 1024)
        store = open_until.enter_context(opened)
        # Another session's window must not change because it is read.
        before = Store(store.backend, Budget(WIDE), "fifo", tokenizer=store.counter) if past else None
        done = open_until.enter_context(progress("sub-calls"))
        if recorded or goes_on:
            _check_is_there(store, session)
        options: dict[str, Any] = {"sub": sub, "sandbox": sandbox, "parallel": parallel, "tools": not no_tools}
        watch = partial(_tell, done=done)
        if recorded:
            result = _again(store, session, source, before, sandbox)
        else:
            try:
                if goes_on:
                    again = {"limits": given, "question": question} | options
                    result = resume(store.session(session), root, source, past=before, watch=watch, **again)
                else:
                    limits = msgspec.structs.replace(Limits(steps=30), **given)
                    agent = RecursiveModel(root, store.session(session), depth=depth, limits=limits, **options)
                    result = agent.ask(question, source, past=before, watch=watch)
            except (ModelError, KeyboardInterrupt):
                say("what was done so far is kept: go on with --resume")
                raise
    _print(result, session, json)
    if result.outcome in WRONG:
        raise typer.Exit(1)


def _coder(model: str) -> str:
    """The spec of the model that writes the code.

    Raises:
        SpecError: none is named and none is detected, or it is too small.
    """
    spec = model or detected()
    if spec in (None, "none"):
        raise SpecError("there is no model that writes the code", advice=f"{CONNECT}, such as --model qwen")
    for weights in catalogue():
        if weights.name == spec:
            # Before it is downloaded and loaded.
            _check_size(spec, weights.parameters)
    return spec


def _check_size(name: str, parameters: int) -> None:
    """Raise `SpecError` if a model of so many parameters, 0 for an unknown number, is too small to write code."""
    if 0 < parameters < MIN_PARAMETERS:
        what = f"{name} has {round(parameters / 10**6)} million parameters, too few to write code"
        raise SpecError(what, advice=f"{CONNECT}, such as --model qwen")


def _source(files: list[Path]) -> Source | None:
    """What is asked about: a text, a file or a folder, or several.

    Raises:
        SpecError: standard input cannot be read, or is named twice.
    """
    if STDIN not in files:
        return files[0] if len(files) == 1 else files or None
    if files.count(STDIN) > 1:
        raise SpecError("standard input is named twice", advice="give - once")
    text, others = _standard_input(), [file for file in files if file != STDIN]
    return {"-": text} | dict(read_files(others)) if others else text


def _standard_input() -> str:
    """All of standard input. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        SpecError: there is none, a person would have to type it, it is empty, or it has no end.
    """
    piped = "pipe a text into it, as in: git log | kilburn ask - --question 'Who changed the parser?'"
    if sys.stdin is None or sys.stdin.closed:
        raise SpecError("standard input is closed", advice=piped)
    if sys.stdin.isatty():
        raise SpecError("standard input is a terminal", advice=piped)
    data = bytearray()
    try:
        # A buffer may give less than it is asked for, and nothing only at the end.
        while piece := sys.stdin.buffer.read(min(MOST + 1 - len(data), 1 << 20)):
            data += piece
            if len(data) > MOST:
                raise SpecError(f"standard input has more than {MOST:,} bytes", advice="put it into files, and give these")
    except OSError as error:
        raise SpecError(f"standard input: {error.strerror}", advice=piped) from error
    if not data:
        raise SpecError("standard input is empty", advice=piped)
    return data.decode("utf-8", "replace")


def _check_is_there(store: Store, session: str) -> None:
    if session not in [info.name for info in store.sessions()]:
        raise SpecError(f"no session {session!r}", advice="name the one of the run with --session")


def _again(store: Store, session: str, source: Source | None, past: Store | None, sandbox: str) -> RecursiveResult:
    with kilburn.open(":memory:", window=store.budget.window, tokenizer=store.counter, embedder=None) as beside:
        return replay(store.session(session), beside.session("again"), source, past=past, sandbox=sandbox)


def _tell(event: Any, done: Done) -> None:
    """Say on standard error what happens."""
    if isinstance(event, SubCalled):
        done(event.done + event.failed)
    elif isinstance(event, Called):
        say(f"[{line(event.name)}: {many(len(event.arguments), 'character')} of code]")
    elif isinstance(event, Returned):
        say(f"[{'failed' if event.failed else 'back'}: {line(event.text[:100])}]")


def _print(result: RecursiveResult, session: str, json: bool) -> None:
    if json:
        tell(msgspec.json.encode(result).decode())
        return
    if result.content is not None:
        tell(result.content if isinstance(result.content, str) else msgspec.json.encode(result.content).decode())
    limit = f", the limit of {result.limit} was reached" if result.limit else ""
    spent = (
        f"{many(result.steps, 'step')}, {many(result.calls, 'sub-call')}, {many(result.tokens, 'token')}, {result.seconds:.0f} s"
    )
    say(f"{result.outcome}{limit}: {spent}; largest prompt {count(result.resident)} tokens; {line(session)} {result.address}")
    for missing in result.missing[:5]:
        more = f" (and {count(missing.count - 1)} more)" if missing.count > 1 else ""
        say(line(f"missing: {missing.prompt}: {missing.why}{more}"))
    if len(result.missing) > 5:
        say(f"and {count(len(result.missing) - 5)} more")
    if result.differing:
        say(line(f"came out otherwise when it was run again: {', '.join(result.differing)}"))
    if result.lacks:
        say(line(f"sandbox {result.sandbox} lacks here: {'; '.join(result.lacks)}"))
