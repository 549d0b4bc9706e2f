"""What a sub-call of a recursive model costs beside the model: many in a batch, and one at a time, in memory and on disk."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator

import kilburn
from figures import Row, emit, parser
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.models.scripted import Scripted
from kilburn.recursion.rlm import RecursiveModel

HOW = {
    "batch": "for at in range(0, {n}, 1000): llm_query_batched([str(n) for n in range(at, min(at + 1000, {n}))])",
    "loop": "for n in range({n}): llm_query(str(n))",
}


class Sub:
    """A model that takes no time."""

    name = "sub"
    form = "chat"
    context = None
    tokenizer = "chars/4"

    def stream(self, request: Request) -> Iterator[Reply]:
        """Always yes."""
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="yes"),)))


def main() -> None:
    """Measure at several numbers of calls."""
    arguments = parser(str(__doc__))
    arguments.add_argument("--calls", type=int, action="append", help="sub-calls of a run [default: 1000 and 10000]")
    given = arguments.parse_args()
    rows: list[Row] = []
    for count in given.calls or [1000, 10_000]:
        batch = 0.0
        for where in ("memory", "disk"):
            for how, code in HOW.items():
                with tempfile.TemporaryDirectory() as folder:
                    path = f"{folder}/a.db" if where == "disk" else ":memory:"
                    store = kilburn.open(path, tokenizer="chars/4", embedder=None)
                    done = 'answer["content"] = 1; answer["ready"] = True'
                    arguments_of = json.dumps({"code": f"{code.format(n=count)}\n{done}"})
                    call = Part(kind=Kind.CALL, text=arguments_of, call="c", name="repl")
                    root = Scripted([Message(role=Role.ASSISTANT, parts=(call,))])
                    start = time.perf_counter()
                    result = RecursiveModel(root, store.session("root"), sub=Sub()).ask("?", "a text")
                    took = time.perf_counter() - start
                    assert result.calls == count
                    batch = batch or took
                    row = {"s": round(took, 2), "ms a call": round(1e3 * took / count, 3), "x": round(took / batch, 2)}
                    rows.append({"what": f"{count:,} calls, {how}, {where}", **row})
                    store.close()
    emit("calling", rows, given.json, "a whole run, with the start of its sandbox; x: compared with a batch in memory")


if __name__ == "__main__":
    main()
