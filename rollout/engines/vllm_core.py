"""vLLM's AsyncLLM as our engine uses it: standing still between two tokens, calls to all workers, how far a sample is.

Part of this is below vLLM's public face. Where a version lacks it, the public way is taken and told once in the log.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
CALL_SECONDS = 120.0


class VllmCore:
    """Wraps a running AsyncLLM. Every call has a deadline: TimeoutError."""

    def __init__(self, llm: "AsyncLLM") -> None:
        """To be made inside the event loop."""
        self.llm = llm
        # vLLM would begin to read its engine's messages with the first request only.
        llm._run_output_handler()
        if not hasattr(llm.engine_core, "pause_scheduler_async"):
            logger.warning("this vLLM cannot pause its scheduler alone: each swap takes 20 ms longer")

    @property
    def dead(self) -> bool:
        """Whether an engine process has ended or its messages can no longer be read."""
        return bool(self.llm.errored)

    async def pause(self, *, clear_cache: bool = False) -> None:
        """Return once no token is under way and all that were sampled are here; requests keep their place.

        clear_cache: unfinished requests will be prefilled again, their tokens so far included.
        """
        async with asyncio.timeout(CALL_SECONDS):
            if hasattr(self.llm.engine_core, "pause_scheduler_async"):
                await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
            else:
                await self.llm.pause_generation(mode="keep", clear_cache=clear_cache)
            while not self.llm.engine_core.outputs_queue.empty() and not self.dead:
                await asyncio.sleep(0)

    async def resume(self) -> None:
        """Go on after `pause`."""
        async with asyncio.timeout(CALL_SECONDS):
            await self.llm.resume_generation()

    async def call(self, method: str) -> list[Any]:
        """Call a method of each worker between two decode steps; what each returned."""
        core = self.llm.engine_core
        async with asyncio.timeout(CALL_SECONDS):
            if len(core.core_engines) == 1:
                return list(await core.collective_rpc_async(method))
            # With data parallelism vLLM's own call gives the answers of the first engine only.
            calls = [
                core._call_utility_async("collective_rpc", method, None, (), None, engine=engine)
                for engine in core.core_engines
            ]
            return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    def num_tokens(self, key: str) -> int | None:
        """Tokens that a request has so far; None if it is not, or no longer, in the engine."""
        state = self.llm.output_processor.request_states.get(key)
        return None if state is None else int(state.detokenizer.num_output_tokens())

    async def close(self) -> None:
        """End vLLM's processes."""
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()  # it would log the end of its engine as an error
        await asyncio.to_thread(self.llm.shutdown)

    async def abort(self, keys: Sequence[str]) -> None:
        """End requests by their key in the engine; those that are collected come out with their tokens so far."""
        if keys:
            await self.llm.abort(keys, internal=True)
