"""Runs the batches of a server: all unfinished ones at once, which take turns in the engine.

Batches come in at any frontend; the first one runs them.
"""

import asyncio
import sqlite3

from jaxllm.logging import init_logger
from jaxllm.openai.batches.store import BatchStore
from jaxllm.server.batch_job import BatchJob
from jaxllm.server.service import Service

logger = init_logger(__name__)

_LOOK_S = 1.0


async def run_batches(service: Service, store: BatchStore) -> None:
    """Run until it is cancelled."""
    info, replicas = service.engine.info, service.engine.config.parallel.data_parallel_size
    most = service.options.max_batch_requests or info.max_num_seqs * replicas
    seats = asyncio.Semaphore(most)  # first come, first served: batches take turns
    tasks: dict[str, asyncio.Task[None]] = {}
    try:
        while not service.is_stopping:
            try:
                for owner, batch in await asyncio.to_thread(store.unfinished):
                    if batch.id not in tasks:
                        job = BatchJob(service, store, seats, owner, batch)
                        tasks[batch.id] = asyncio.create_task(job.run())
                await _take_ended(tasks, store)
            except sqlite3.Error as error:
                logger.error("the batches cannot be read or written: %s", error)
            await asyncio.sleep(_LOOK_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _take_ended(tasks: dict[str, asyncio.Task[None]], store: BatchStore) -> None:
    """Forget the batches that have ended; an error that nobody expects fails its batch alone."""
    for name in [name for name, task in tasks.items() if task.done()]:
        error = tasks.pop(name).exception()
        if error is not None:
            logger.error("%s failed", name, exc_info=error)
            await asyncio.to_thread(store.fail, name, "internal_error", "see the log")
