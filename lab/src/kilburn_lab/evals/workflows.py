"""Measures whether an agent completes more errands, in fewer steps, when it remembers how it did earlier errands.

The agent receives a stream of errands (`kilburn_lab.evals.errands`): first simple errands, then compositions of two and of three.
The agent is a script that knows only its prompt: it reads the list of programs and then the help of each program until one seems
to match, tries it, and gives up after a fixed number of steps. It reads workflows in its prompt like any other text. Its run is
judged, and learned from, before the next errand. The files decide whether an errand is done, independently of the workflows and
the judge.

- `none`: no memory;
- `true`: a judge that looks at the files;
- `late`: the same, but nothing is learned from simple errands, so the building blocks are missing;
- `lying`: a judge whose verdict is reversed in a percentage of cases (`lies`);
- `gullible`: a judge that always says yes.

All variants have the same errands; the agent's random choices are independent.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.agents.tool import Tool
from kilburn.errors import SpecError
from kilburn.kernel.store import Store
from kilburn.memory.episodes import Episode
from kilburn.memory.workflows import Workflows
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request
from kilburn_lab.evals.errands import Errand, ErrandWorld
from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.sample import HALVES

ARMS = ("none", "true", "late", "lying", "gullible")
NAMES = {1: "simple", 2: "of two", 3: "of three", 0: "all"}
OWNER = "errands"

ASK = "Do this errand with the programs of this folder, which `ls bin` lists. A program says with --help how it is called."

CARE = 0.8
"""Minimum share of a request's words in a program's help text for the script to try the program."""

SAME = 0.8
"""The share of words that each part of a request and of a workflow's goal must have in common, before the script follows it."""

_FILE, _NUMBER, _WORD = r"\w+\.txt", r"(?<![\w.])\d+(?![\w.])", r"\"(\w+)\""
_SHOWN = re.compile(r"^\w+ workflows/.*:\n(.+)\n\n((?:\d+\. .+\n?)+)", re.MULTILINE)
_STEP = re.compile(r"\d+\. shell (\{.*\})")
_USAGE = re.compile(r"usage: (\w+) (.+)\n(.+)")
_COMMON = frozenset(
    (
        *("a", "and", "are", "be", "by", "do", "for", "in", "into"),
        *("is", "it", "its", "now", "of", "please", "the", "then", "this", "to"),
    )
)


class Looked:
    """What a script has read in its prompt: the errand, the commands so far with their results, and workflows."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        said = "\n".join(str(message.get("content") or "") for message in messages if message.get("role") == "user")
        self.parts = said.partition("\n")[0].rpartition(": ")[2].rstrip(".").split("; then ")
        self.flows = [(goal, [*map(_command, _STEP.findall(steps))]) for goal, steps in _SHOWN.findall(said)]
        self.done: dict[str, str] = {}
        calls: dict[str, str] = {}
        for message in messages:
            for call in message.get("tool_calls") or ():
                calls[call["id"]] = _command(call["function"]["arguments"])
            if message.get("role") == "tool":
                self.done[calls.get(message["tool_call_id"], "")] = str(message.get("content") or "")

    @property
    def unread(self) -> list[str] | None:
        """The programs of which it has not read the help; None if it does not know which there are."""
        if "ls bin" not in self.done:
            return None
        programs = [name for name in self.done["ls bin"].split() if name not in ("ls", "cat")]
        return [name for name in programs if f"{name} --help" not in self.done]

    def failed(self, command: str) -> bool:
        """Whether a command was tried, and its result says that it failed."""
        return self.done.get(command, "").startswith("exit ")


class ErrandScript:
    """A scripted substitute for a model that does errands with the information in its prompt.

    Args:
        chance: determines the order in which it reads the programs' help texts. After the last one, it tries the best match.
    """

    name, form, tokenizer = "errand-script", "chat", "chars/4"
    context: int | None = None

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """The next command, or the end of the work."""
        looked = Looked(request.messages)
        command = self._next(looked)
        if command is None:
            part, finish = Part(kind=Kind.TEXT, text="Done."), Finish.STOP
        else:
            text = msgspec.json.encode({"command": command}).decode()
            call = f"e{len(looked.done)}"
            part, finish = Part(kind=Kind.CALL, call=call, name="shell", text=text), Finish.CALLS
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(part,)), finish=finish)

    def _next(self, looked: Looked) -> str | None:
        at = 0
        while at < len(looked.parts):
            commands, taken = self._known(looked, at)
            if not commands:
                return self._look(looked)
            for command in commands:
                if command not in looked.done:
                    return command
            at += taken
        return None

    def _known(self, looked: Looked, at: int) -> tuple[list[str], int]:
        """The commands for the errand's parts from one on, and for how many they are: by the workflow for the most parts, then
        by the help that was read."""
        for end in range(len(looked.parts), at, -1):
            wanted = "; then ".join(looked.parts[at:end])
            fitting = [(_alike(goal, wanted), commands) for goal, commands in looked.flows]
            for share, commands in sorted(fitting, key=lambda each: -each[0]):
                filled = [_filled(command, wanted) for command in commands]
                if share >= SAME and all(command and not looked.failed(command) for command in filled):
                    return [command for command in filled if command], end - at
        read = [usage for usage in (_USAGE.search(result) for result in looked.done.values()) if usage is not None]
        if looked.unread != []:
            read = [usage for usage in read if _covered(looked.parts[at], usage[3]) >= CARE]
        for usage in sorted(read, key=lambda usage: -_covered(looked.parts[at], usage[3])):
            command = _called(usage[1], usage[2], looked.parts[at])
            if command and not looked.failed(command):
                return [command], 1
        return [], 0

    def _look(self, looked: Looked) -> str | None:
        if looked.unread is None:
            return "ls bin"
        return f"{self._chance.choice(looked.unread)} --help" if looked.unread else None


def _command(arguments: str) -> str:
    try:
        return str(msgspec.json.decode(arguments)["command"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


def _words(text: str) -> set[str]:
    bare = re.sub(rf"\{{\w+\}}|{_FILE}|{_WORD}|{_NUMBER}", " ", text.lower())
    return {word.rstrip("s") for word in re.findall(r"[a-z]+", bare) if word not in _COMMON}


def _covered(request: str, says: str) -> float:
    words = _words(request)
    return len(words & _words(says)) / len(words) if words else 0.0


def _alike(goal: str, request: str) -> float:
    """How much a workflow's goal is like a request: of their parts, one by one, the least."""
    parts, others = goal.split("; then "), request.split("; then ")
    if len(parts) != len(others):
        return 0.0
    pairs = [(_words(one), _words(other)) for one, other in zip(parts, others, strict=True)]
    return min(len(one & other) / max(1, len(one | other)) for one, other in pairs)


def _values(request: str) -> dict[str, list[str]]:
    return {
        "file": list(dict.fromkeys(re.findall(_FILE, request))),
        "number": re.findall(_NUMBER, request),
        "name": re.findall(_WORD, request),
    }


def _filled(command: str, request: str) -> str:
    """A workflow's step with the values of a request; "" if one is missing."""
    values = _values(request)
    for kind, number in re.findall(r"\{([a-z]+)(\d+)\}", command):
        known = values.get(kind, [])
        if int(number) > len(known):
            return ""
        command = command.replace(f"{{{kind}{number}}}", known[int(number) - 1])
    return command


def _called(program: str, options: str, request: str) -> str:
    """A program as its help says, with the values of a request; "" if one is missing."""
    values = _values(request)
    files, numbers, words = values["file"], values["number"], values["name"]
    if not files:
        return ""
    # What comes out is named last.
    known = {"FROM": files[0], "WITH": files[-2] if len(files) > 2 else files[0], "INTO": files[-1]}
    known |= {"COUNT": numbers[0]} if numbers else {}
    known |= {"WORD": words[0], "BY": words[1]} if len(words) > 1 else {}
    wanted = re.findall(r"(-\w) ([A-Z]+)", options)
    if any(what not in known for _, what in wanted):
        return ""
    return " ".join((program, *(f"{letter} {known[what]}" for letter, what in wanted)))


class ErrandRun(msgspec.Struct, frozen=True, kw_only=True):
    """How one errand went: steps are calls; `shown` tokens of workflows in its prompt."""

    stream: int
    arm: str
    parts: int
    done: bool
    steps: int
    shown: int


class FlowRow(msgspec.Struct, frozen=True, kw_only=True):
    """Errands of one kind under one arm.

    Args:
        done: the share that was done; `more` how much more than without memory, with its interval of 95% (streams are drawn).
        steps: the mean, errands that failed included; `fewer` the share of the steps without memory that are saved.
        both: the same share over the errands that were done with and without; None where there are none.
        shown: tokens of workflows, the mean.
    """

    arm: str
    kind: str
    errands: int
    done: float
    more: float
    more_low: float
    more_high: float
    steps: float
    fewer: float
    fewer_low: float
    fewer_high: float
    both: float | None
    shown: float


class FlowReport(EvalReport, frozen=True, kw_only=True):
    """Success and steps by arm and kind of errand; and, by arm, workflows in force at the end and those that were retired."""

    seed: int
    half: str
    streams: int
    limit: int
    lies: int
    kept: dict[str, float]
    retired: dict[str, float]
    rows: list[FlowRow]

    def table(self) -> str:
        """For people."""
        columns = (
            "judge={arm} | errands={kind} | of={errands} | done={done:.2f} | more={more:+.2f} | "
            "95%={more_low:+.2f} {more_high:+.2f} | steps={steps:.1f} | fewer={fewer:.0%} | "
            "95% ={fewer_low:.0%} {fewer_high:.0%} | where both did it={both:.0%} | tokens={shown:.0f}"
        )
        flows = (f"{arm} {kept:.0f} and {self.retired[arm]:.0f}" for arm, kept in self.kept.items())
        words = f"Means over {self.streams} streams; at most {self.limit} steps an errand; `lying` lies in {self.lies}% of cases."
        return "\n".join(
            (table_of(self.rows, columns, ("judge", "errands")), words, f"Workflows kept and retired: {', '.join(flows)}.")
        )


def evaluate(
    arms: Sequence[str] = ARMS,
    *,
    streams: int = 2,
    errands: int = 36,
    limit: int = 16,
    lies: int = 30,
    half: str = HALVES[0],
    seed: int = 0,
    progress: Progress = unwatched,
) -> FlowReport:
    """Do the errands of some streams under each arm.

    Args:
        errands: in each stream: a third simple, a third of two parts, a third of three.
        limit: steps of an errand; with 16 the script can read the help of all programs.
        lies: cases out of a hundred in which the judge `lying` says the opposite.
        half: whose wordings the errands have.

    Raises:
        SpecError: no such arm or half, fewer than one stream or three errands, no bash.
    """
    check_known("judge", arms, ARMS)
    check_known("half", [half], HALVES)
    if streams < 1 or errands < 3 or limit < 1 or not 0 <= lies <= 100:
        raise SpecError(
            f"streams={streams}, errands={errands}, limit={limit}, lies={lies}", advice="give 1, 3, 1, 0 to 100 or more"
        )
    wanted = tuple(dict.fromkeys(("none", *arms)))
    runs: list[ErrandRun] = []
    kept = dict.fromkeys(wanted, 0.0)
    retired = dict.fromkeys(wanted, 0.0)
    total = streams * len(wanted) * errands
    progress(0, total)
    for number in range(seed, seed + streams):
        with tempfile.TemporaryDirectory(prefix="kilburn-errands-") as folder:
            world = ErrandWorld(Path(folder), number, half)
            asked = [world.errand(1 + 3 * at // errands) for at in range(errands)]
            for arm in wanted:
                done = _stream(world, number, asked, arm, limit, lies)
                runs += done[0]
                kept[arm] += done[1] / streams
                retired[arm] += done[2] / streams
                progress(len(runs), total)
    rows = [_row(runs, arm, parts, seed) for arm in wanted for parts in NAMES]
    return FlowReport(seed=seed, half=half, streams=streams, limit=limit, lies=lies, kept=kept, retired=retired, rows=rows)


def _stream(
    world: ErrandWorld, number: int, asked: Sequence[Errand], arm: str, limit: int, lies: int
) -> tuple[list[ErrandRun], int, int]:
    """One stream under one arm: how each errand went, workflows in force in the end, and how many were retired."""
    chance = random.Random(f"workflows/{number}/{arm}")
    runs, retired = [], 0
    with kilburn.open(":memory:", window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        flows = Workflows(store, OWNER)
        for at, errand in enumerate(asked):
            world.begin(errand)
            shown, steps = _carried_out(
                store, world, errand, f"errand-{at}", ErrandScript(chance), flows if arm != "none" else None, limit
            )
            done = world.is_done(errand)
            runs.append(ErrandRun(stream=number, arm=arm, parts=errand.parts, done=done, steps=steps, shown=shown))
            if arm == "none" or (arm == "late" and errand.parts == 1):
                continue
            verdict = arm == "gullible" or (done != (arm == "lying" and chance.randrange(100) < lies))
            told = flows.learn(store.session(f"errand-{at}"), judge=_Fixed(verdict))
            retired += len(told.retired)
            store.release(f"errand-{at}")
        return runs, len(flows.list()), retired


class _Fixed:
    """A judge that has made up its mind."""

    def __init__(self, verdict: bool) -> None:
        self._verdict = verdict

    def __call__(self, _: Episode) -> bool:
        return self._verdict


def _carried_out(
    store: Store, world: ErrandWorld, errand: Errand, name: str, script: ErrandScript, flows: Workflows | None, limit: int
) -> tuple[int, int]:
    """Have an agent do an errand; tokens of workflows that it was shown, and its steps."""

    def shell(command: str) -> str:
        """Run a command in the folder."""
        return world.shell(command)

    session = store.session(name, user=OWNER)
    session.append({"role": "system", "content": ASK}, {"role": "user", "content": errand.text})
    beside = flows.message(errand.text) if flows is not None else None
    if beside is not None:
        session.append(beside)
    agent = Agent(script, [Tool(shell)], session, limits=Limits(steps=limit + 1, seconds=None), memory=False)
    agent.run()
    steps = sum(page.kind is Kind.CALL for page, _ in session.contents.pages())
    if steps > limit:  # its last call was one too many
        steps = limit
    session.append({"role": "assistant", "content": "I end here."})
    return (store.counter.count(beside.parts[0].text) if beside is not None else 0), steps


def _row(runs: Sequence[ErrandRun], arm: str, parts: int, seed: int) -> FlowRow:
    """The figures of an arm, beside those of the same errands without memory."""
    mine = [run for run in runs if run.arm == arm and parts in (0, run.parts)]
    base = [run for run in runs if run.arm == "none" and parts in (0, run.parts)]
    pairs = list(zip(mine, base, strict=True))
    more = grouped((one.stream, float(one.done) - float(other.done)) for one, other in pairs)
    saved = grouped((one.stream, (one.steps, other.steps)) for one, other in pairs)
    sums = [(sum(one for one, _ in group), sum(other for _, other in group)) for group in saved]
    shares = [[1 - one / other if other else 0.0] for one, other in sums]
    both = [(one.steps, other.steps) for one, other in pairs if one.done and other.done]
    low, high = interval(more, seed)
    fewer_low, fewer_high = interval(shares, seed)
    return FlowRow(
        arm=arm,
        kind=NAMES[parts],
        errands=len(mine),
        done=mean(float(run.done) for run in mine),
        more=mean(value for group in more for value in group),
        more_low=low,
        more_high=high,
        steps=mean(run.steps for run in mine),
        fewer=mean(share for (share,) in shares),
        fewer_low=fewer_low,
        fewer_high=fewer_high,
        both=1 - sum(one for one, _ in both) / sum(other for _, other in both) if both else None,
        shown=mean(run.shown for run in mine),
    )
