"""What rollout, reward, reference and trainer share: they find the run through the conductor and stay in it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import protos
from services.actor import Actor, Bind, Result, cancel
from services.compose import load_json, override_section
from services.config import Config
from services.errors import Broken, Replaced
from services.loading import alone_on_card
from services.membership import Membership

logger = logging.getLogger(__name__)
# transformers patches torch for the whole process while it loads: a second load beside it leaves tensors without data.
LOADING = threading.Lock()


class Worker(Actor):
    """An actor that belongs to a run. Subclasses load in `prepare`, and do their work in `serve`."""

    def __init__(
        self,
        bind: Bind,
        *,
        conductor: str,
        config: Config | None = None,
        folder: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        super().__init__(bind)
        self.membership = Membership(self, conductor, state=self.state)
        self._given = config
        self._overrides = overrides
        self._folder = folder

    @property
    def config(self) -> Config:
        assert self._given is not None, "the config is there from setup on"
        return self._given

    @property
    def folder(self) -> Path:
        """The run folder, as far as this machine has it."""
        assert self._folder is not None, "the run folder is known from setup on"
        return self._folder

    async def prepare(self) -> None:
        """Load what is heavy."""

    async def load(self, function: Callable[[], Result]) -> Result:
        """Run what loads a model on the compute thread; one at a time in a process."""

        def alone() -> Result:
            with LOADING:
                return function()

        return await self.compute(alone)

    async def serve(self) -> None:
        """Work in the background until cancelled."""
        await self.draining.wait()

    def state(self) -> protos.JoinRequest:
        """What the conductor wants to know at a join: versions held."""
        return protos.JoinRequest()

    async def setup(self) -> None:
        if self._given is None or self._folder is None:
            reply = await self.membership.run_config()
            self._given = self._given or load_json(reply.config_json)
            self._folder = self._folder or Path(reply.run_folder)
        if self._overrides:
            self._given = override_section(self._given, self.role, self._overrides)
        launch = self.config.launch
        async with alone_on_card(self.folder, shared=launch.share_gpu or launch.time_sharing):
            await self.prepare()
        await self.membership.join()
        await self.serving(True)

    async def work(self) -> None:
        """Serve and stay a member; whichever ends first ends both. Raises Broken for what goes wrong at work."""
        tasks = {asyncio.create_task(self.serve()), asyncio.create_task(self.membership.stay())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Replaced:
            raise
        except Exception as error:
            logger.exception("the service broke at work")
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            await cancel(*tasks)

    async def close(self) -> None:
        await self.membership.leave("drained")
        await super().close()
