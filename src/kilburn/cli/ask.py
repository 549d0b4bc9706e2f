"""`ask`: a question about texts of any length, answered by a model that reads them by code."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Option

import kilburn
from kilburn.agents.loop import MAX_CALLS, MAX_SECONDS, MAX_TOKENS, UNLIMITED, Called, Limits, Returned
from kilburn.budget import Budget
from kilburn.cli.access import WIDE, Options
from kilburn.cli.model_loading import CONNECT, closing_model, detected_model, open_for_agent, open_model
from kilburn.cli.screen import Done, count, many, progress
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import ModelError, SpecError
from kilburn.models.weights import catalogue
from kilburn.opening import Store
from kilburn.prices import find_prices
from kilburn.recursion.inquiry import AnswerOutcome, SubCalled
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult, replay, resume
from kilburn.recursion.variable import Source, read_files
from kilburn.terminal import line, say, tell

UNANSWERED = (AnswerOutcome.UNREADY, AnswerOutcome.NOTHING)
"""Outcomes without an answer: exit status 1."""

MIN_PARAMETERS = 400_000_000
"""Size of the smallest model that may write the code. SmolLM2 with 135 million gave no answer in 250 seconds."""

STDIN = Path("-")
MAX_STDIN = 1 << 28
"""Bytes that are read from standard input, which may be endless: three times as many tokens as a run may spend."""

LIMITS = ("steps", "calls", "tokens", "seconds", "money")


class AskOptions(Options, frozen=True, kw_only=True):
    """The arguments and options of `ask`.

    Args:
        files [FILE]: Files and folders to read; - for standard input.
        question TEXT: Ask this question.
        model SPEC: Let this model write the code, such as "chat('gpt-5.5')"; by default, the first that can be used.
        sub_model SPEC: Let this model answer the questions that the code asks; by default the same.
        past: Let the code read the sessions of the store.
        session NAME: Record the run in this session.
        goes_on --resume: Continue the session's last question where it was cut off.
        tokens: Stop after this many tokens, prompts and replies together.

    Advanced:
        recorded --replay: Run the session's last question again, without a model.
        depth: Let the code ask a model (1), start runs of its own on pieces of the text (2 or more), or neither (0).
        steps: Stop after this many replies of the model that writes the code.
        calls: Stop after this many replies of all models together.
        seconds: Stop after this many seconds.
        money: Stop after this much money, by --prices.
        no_limits: Apply no limits except those that are given.
        prices NAME: Count money by this price list: hosted, automatic or local.
        window: Keep the prompt within this many tokens, or within the model's own window if that is smaller.
        policy SPEC: Let this policy choose what leaves the window.
        reply: Cut a reply after this many tokens.
        parallel: Ask this many models at the same time.
        sandbox NAME: Run the code in this sandbox: auto, cpython or monty.
        no_tools: Offer no tools even to a model that takes them: it writes its code in fenced blocks.
    """

    files: list[Path] | None = None
    question: str = ""
    model: str = ""
    sub_model: str = ""
    past: bool = False
    session: str = "ask"
    goes_on: bool = False
    tokens: Annotated[int | None, Option(min=0, show_default=f"{MAX_TOKENS:,}")] = None
    db: Db = None
    tenant: Tenant = None
    json: Json = False
    recorded: bool = False
    depth: Annotated[int, Option(min=0)] = 1
    steps: Annotated[int | None, Option(min=0, show_default="30")] = None
    calls: Annotated[int | None, Option(min=0, show_default=f"{MAX_CALLS:,}")] = None
    seconds: Annotated[float | None, Option(min=0, show_default=f"{MAX_SECONDS:,.0f}")] = None
    money: Annotated[float | None, Option(min=0, show_default=f"what {MAX_TOKENS:,} fresh tokens cost: 60 if hosted")] = None
    no_limits: bool = False
    prices: Annotated[str | None, Option(show_default="hosted")] = None
    window: int = 8000
    policy: str = "hybrid"
    reply: Annotated[int | None, Option(min=1, show_default="1024")] = None
    parallel: Annotated[int, Option(min=1)] = 4
    sandbox: str = "auto"
    no_tools: bool = False


@app.command()
def ask(options: AskOptions) -> None:
    """Ask about files that are larger than any window: the model reads them by code, in a sandbox.

    In the sandbox, the text is a variable. The model sees its size, its beginning and what its code prints. The code may ask a
    model about pieces of the text. Every step is a page of the session, and --replay repeats the run without a model. --resume
    continues a run that was interrupted, and asks nothing twice. It keeps the limits of the run, except for those that are given
    again. It also continues a run that a limit ended without an answer, if that limit is given again and is higher.

    Without --model, the first of these writes the code, and a line says which: OpenAI if OPENAI_API_KEY is set; Anthropic if
    ANTHROPIC_API_KEY is set; a model server on this machine, at the default port of Ollama, llama.cpp or vLLM (or one of the
    base URLs in KILBURN_MODEL_SERVERS, separated by commas). A model that takes no tools writes its code in fenced blocks.

    The exit status is 1 if there is no answer.

    Examples:

        kilburn ask report.txt notes/ --question "Which suppliers were late twice?"

        echo "Besra came late on Monday and on Friday." | kilburn ask - --question "Who was late twice?" --model "chat('gpt-5.5')"

        kilburn ask --past --question "What did I decide about the parser?" --model "chat('gpt-5.5')" --sub-model qwen
    """
    if not options.files and not options.past:
        raise SpecError("nothing to ask about", advice="give files or folders, or --past")
    if options.recorded and options.goes_on:
        raise SpecError("--replay and --resume", advice="use one of them")
    if not (options.question or options.recorded or options.goes_on):
        raise SpecError("there is no question", advice="give --question TEXT")
    spec = None if options.recorded else _coder(options.model)
    source = _source(options.files or [])
    with ExitStack() as stack:
        root = stack.enter_context(closing_model(open_model(spec)))
        if spec is not None:
            _check_size(root.name, getattr(root, "parameters", 0))
        sub = stack.enter_context(closing_model(None if options.recorded else open_model(options.sub_model or None)))
        store = stack.enter_context(
            open_for_agent(
                options.db, options.tenant, root, window=options.window, policy=options.policy, reply=options.reply or 1024
            )
        )
        # Reading the past must not change the windows of its sessions.
        past = Store(store.backend, Budget(WIDE), "fifo", tokenizer=store.counter) if options.past else None
        report = stack.enter_context(progress("sub-calls"))
        result = _run(options, store, root, sub, source, past, report)
    _print(result, options.session, options.json)
    if result.outcome in UNANSWERED:
        raise typer.Exit(1)


def _run(
    options: AskOptions, store: Store, root: Any, sub: Any, source: Source | None, past: Store | None, report: Done
) -> RecursiveResult:
    """Ask, resume or replay."""
    if options.recorded or options.goes_on:
        _check_exists(store, options.session)
    session = store.session(options.session)
    if options.recorded:
        return _replay(store, options.session, source, past, options.sandbox)
    settings: dict[str, Any] = {
        "sub": sub, "sandbox": options.sandbox, "parallel": options.parallel, "tools": not options.no_tools
    }  # fmt: skip
    limits = _limits(options)
    watch = partial(_report, report=report)
    try:
        if options.goes_on:
            return resume(session, root, source, past=past, watch=watch, limits=limits, question=options.question, **settings)
        complete = msgspec.structs.replace(Limits(steps=30), **limits)
        agent = RecursiveModel(root, session, depth=options.depth, limits=complete, **settings)
        return agent.ask(options.question, source, past=past, watch=watch)
    except (ModelError, KeyboardInterrupt):
        say("the run so far is stored: continue it with --resume")
        raise


def _limits(options: AskOptions) -> dict[str, Any]:
    """Return the limits that the command line sets."""
    values = {name: getattr(options, name) for name in (*LIMITS, "reply")}
    limits = {name: value for name, value in values.items() if value is not None}
    if options.no_limits:
        limits = {name: getattr(UNLIMITED, name) for name in LIMITS} | limits
    if options.prices or not options.goes_on:
        limits["prices"] = find_prices(options.prices or "hosted")
    return limits


def _coder(model: str) -> str:
    """Return the spec of the model that writes the code.

    Raises:
        SpecError: no model is given or detected, or it is too small.
    """
    spec = model or detected_model()
    if spec in (None, "none"):
        raise SpecError("there is no model that writes the code", advice=f"{CONNECT}, such as --model qwen")
    for weights in catalogue():
        if weights.name == spec:
            # Checked before the model is downloaded and loaded.
            _check_size(spec, weights.parameters)
    return spec


def _check_size(name: str, parameters: int) -> None:
    """Raise `SpecError` if a model is too small to write code. An unknown number of parameters is 0."""
    if 0 < parameters < MIN_PARAMETERS:
        problem = f"{name} has {round(parameters / 10**6)} million parameters, too few to write code"
        raise SpecError(problem, advice=f"{CONNECT}, such as --model qwen")


def _source(files: list[Path]) -> Source | None:
    """Return the texts to ask about.

    Raises:
        SpecError: standard input cannot be read, or is named twice.
    """
    if STDIN not in files:
        return files[0] if len(files) == 1 else files or None
    if files.count(STDIN) > 1:
        raise SpecError("standard input is named twice", advice="give - once")
    text, files_only = _standard_input(), [file for file in files if file != STDIN]
    return {"-": text} | dict(read_files(files_only)) if files_only else text


def _standard_input() -> str:
    """Read standard input. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        SpecError: standard input is closed, a terminal, empty or too long.
    """
    advice = "pipe a text into it, as in: git log | kilburn ask - --question 'Who changed the parser?'"
    if sys.stdin is None or sys.stdin.closed:
        raise SpecError("standard input is closed", advice=advice)
    if sys.stdin.isatty():
        raise SpecError("standard input is a terminal", advice=advice)
    data = bytearray()
    try:
        # A read may return less than requested, and returns nothing only at the end.
        while chunk := sys.stdin.buffer.read(min(MAX_STDIN + 1 - len(data), 1 << 20)):
            data += chunk
            if len(data) > MAX_STDIN:
                raise SpecError(f"standard input has more than {MAX_STDIN:,} bytes", advice="put it into files, and give these")
    except OSError as error:
        raise SpecError(f"standard input: {error.strerror}", advice=advice) from error
    if not data:
        raise SpecError("standard input is empty", advice=advice)
    return data.decode("utf-8", "replace")


def _check_exists(store: Store, session: str) -> None:
    if session not in [info.name for info in store.sessions()]:
        raise SpecError(f"no session {session!r}", advice="name the one of the run with --session")


def _replay(store: Store, session: str, source: Source | None, past: Store | None, sandbox: str) -> RecursiveResult:
    with kilburn.open(":memory:", window=store.budget.window, tokenizer=store.counter, embedder=None) as memory:
        return replay(store.session(session), memory.session("again"), source, past=past, sandbox=sandbox)


def _report(event: Any, report: Done) -> None:
    """Report an event on standard error."""
    if isinstance(event, SubCalled):
        report(event.done + event.failed)
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
        say(line(f"differs from the recorded run: {', '.join(result.differing)}"))
    if result.lacks:
        say(line(f"sandbox {result.sandbox} lacks on this machine: {'; '.join(result.lacks)}"))
