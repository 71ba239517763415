"""What a person sees of a run: a table that is drawn again while it goes on, or one line every few seconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

import protos
from services.actor import cancel
from services.channel import Retry, call, connect
from services.commands.view import Rates, line, panel
from services.errors import PeerError
from services.serve import ADDRESS_FILE

if TYPE_CHECKING:
    from protos.generated.conductor_pb2_grpc import ConductorAsyncStub  # the stubs alone know it

LOOK_SECONDS = 0.5
LINE_SECONDS = 5.0


class LiveView:
    """Polls the conductor's Status and shows it; a conductor that is away is shown as such."""

    def __init__(self, address: str, *, plain: bool) -> None:
        self._plain = plain
        self._console = Console()
        self._address = address
        self._task: asyncio.Task[None] | None = None
        self._rates = Rates()

    async def __aenter__(self) -> LiveView:
        self._task = asyncio.create_task(self._show(), name="live-view")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            await cancel(self._task)

    async def _show(self) -> None:
        channel = connect(self._address)
        stub = protos.ConductorStub(channel)
        try:
            if self._plain:
                await self._lines(stub)
            else:
                with Live(console=self._console, refresh_per_second=4, transient=False) as live:
                    while True:
                        status = await look(stub)
                        live.update(Text("starting ...") if status is None else self._draw(status))
                        await asyncio.sleep(LOOK_SECONDS)
        finally:
            await channel.close()

    async def _lines(self, stub: ConductorAsyncStub) -> None:
        while True:
            status = await look(stub)
            if status is not None:
                self._rates.see(status)
                self._console.print(line(status, self._rates), soft_wrap=True, markup=False, highlight=False)
            await asyncio.sleep(LINE_SECONDS)

    def _draw(self, status: protos.ConductorStatusReply) -> RenderableType:
        self._rates.see(status)
        return panel(status, self._rates)


async def look(stub: ConductorAsyncStub) -> protos.ConductorStatusReply | None:
    """The run's status; None where the conductor does not answer now."""
    with suppress(PeerError):
        return await call(
            stub.Status, protos.ConductorStatusRequest(), deadline_seconds=2.0, what="asking for the status"
        )
    return None


def print_status(run: str) -> int:
    """Print where a run stands; 1 where nobody answers."""
    folder = Path(run)
    file = folder / ADDRESS_FILE
    address = file.read_text().strip() if file.is_file() else run
    console = Console()
    status = asyncio.run(ask(address)) if ":" in address else None
    if status is None:
        summary = folder / "summary.json"
        if summary.is_file():
            console.print_json(summary.read_text())
            return 0
        console.print(f"no conductor answers for {run}")
        return 1
    console.print(panel(status, Rates()))
    ledger = status.ledger
    dropped = "  ".join(f"dropped_{reason} {count}" for reason, count in ledger.dropped.items())
    console.print(
        f"accepted {ledger.accepted} = trained {ledger.trained} + quarantined {ledger.quarantined}"
        f" + in flight {ledger.in_flight}  {dropped}"
    )
    return 0


async def ask(address: str) -> protos.ConductorStatusReply | None:
    channel = connect(address)
    try:
        retry = Retry(budget_seconds=1.0)
        request = protos.ConductorStatusRequest()
        stub = protos.ConductorStub(channel)
        with suppress(PeerError):
            return await call(stub.Status, request, deadline_seconds=2.0, retry=retry, what="asking for the status")
        return None
    finally:
        await channel.close()
