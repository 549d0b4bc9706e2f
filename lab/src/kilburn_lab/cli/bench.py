"""`lab bench`: how fast the parts are on this machine, each a verb of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from kilburn_lab.cli.verbs import Option, Work, lab, peers_of, verb
from kilburn_lab.evals.gateway import PEERS
from kilburn_lab.evals.gateway import evaluate as evaluate_gateway
from kilburn_lab.evals.load_report import LoadReport
from kilburn_lab.evals.measure import Progress

benches = typer.Typer(help="Measure how fast the parts are on this machine.", no_args_is_help=True, rich_markup_mode=None)
lab.add_typer(benches, name="bench")


@benches.callback()
def group() -> None:
    """Measure how fast the parts are on this machine."""


GATEWAY = """Measure the gateway: first byte, processor time, requests per second, memory, many streams, new conversations.

A stub on this machine answers. Kilburn is compared with no proxy, with a proxy that only forwards, and with other systems for
which you name a Python that has them installed.

Examples:

    kilburn lab bench gateway

    kilburn lab bench gateway --requests 1000 --peer litellm=/tmp/peers/bin/python
"""


def _load(*, over: Sequence[str] | None, progress: Progress, **options: Any) -> LoadReport:
    """Put a load on gateways over one store, kill them meanwhile, and count lost, doubled and wrong messages.

    Clients in three wire forms, streaming and not, take the gateways in turn. They retry as the official SDKs do; some disconnect
    in the middle of a reply. A stub replies, and each of its replies can be verified. At the end the store is compared with the
    replies that the clients received. The exit status is 1 if a message is lost, doubled or wrong.

    Examples:

        kilburn lab bench load

        kilburn lab bench load --over sqlite --kill-gateways 5 --seed 7

        kilburn lab bench load --full --json
    """
    from kilburn_lab.evals.load import FILE, POSTGRES, evaluate  # it needs the gateway, an extra

    return evaluate(over or (FILE, POSTGRES), progress=progress, **options)


verb(
    "gateway",
    evaluate_gateway,
    Work("asking", "request", 0.01, {"requests": 10_000, "rounds": 100, "streams": 200, "sessions": 10_000}),
    GATEWAY,
    among=benches,
    requests=Option("Requests per system, 16 at once; memory is measured meanwhile.", least=1),
    rounds=Option("Requests for the time to the first byte.", least=1),
    streams=Option("Concurrent streams.", least=1),
    window=Option("Tokens of Kilburn's window.", least=1),
    sessions=Option("Sessions in the largest store for new conversations.", least=1),
    peers=Option(
        f"Also another system ({', '.join(PEERS)}), by a Python that has it.",
        "NAME=PYTHON",
        "--peer",
        kind=list[str] | None,
        by=peers_of,
    ),
)
verb(
    "load",
    _load,
    Work(
        "asking", "exchange", 0.1, {"sessions": 1000, "clients": 50}
    ),  # half an hour: 50 clients that ask every ten seconds come to 9,000 requests
    _load.__doc__,
    among=benches,
    over=Option(
        "sqlite, postgres (one of its own) or a URL of one; may be given again. The first two by default.",
        "NAME|URL",
        kind=list[str] | None,
        default=None,
    ),
    sessions=Option("Sessions of 2 to 40 exchanges, 9 on average.", least=1, kind=int, default=24),
    clients=Option("Concurrent sessions.", least=1, kind=int, default=8),
    gateways=Option("Gateway processes on the store.", least=1, kind=int, default=2),
    window=Option("Tokens of the gateways' window; longer sessions are compacted.", least=2000, kind=int, default=3000),
    kill_gateways=Option(
        "Between two kills of a gateway; 0 for none.", "SECONDS", "--kill-gateways", least=0, kind=float, default=12.0
    ),
    restart_postgres=Option(
        "Between two restarts of the PostgreSQL of its own.", "SECONDS", "--restart-postgres", least=0, kind=float, default=15.0
    ),
    leaving=Option("Let some clients disconnect during a stream.", name="--leaving/--no-leaving", kind=bool, default=True),
    seed=Option("Random seed of messages and kills.", kind=int, default=0),
    logs=Option("Store the logs of the gateways in this folder.", "DIR", kind=Path | None, default=None),
)
