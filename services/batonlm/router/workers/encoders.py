"""Vectors and scores for this router's requests: from an encode worker, in each tenant's turn."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from batonlm.core.errors import BatonError, NotFound, from_reason, model_not_found
from batonlm.core.request.model import ModelDescription, ModelTask, WorkerIdentity
from batonlm.core.request.request import TextPair, VectorInput, VectorPrompt
from batonlm.core.routing.failures import RetryBudget
from batonlm.core.routing.routing import models_of
from batonlm.router.config import RouterConfig
from batonlm.router.workers.clients import TOKEN_ID_BYTES
from batonlm.router.workers.fleet import Fleet
from batonlm.router.workers.work_queue import LONG_BYTES, AskedBy, Lane, WorkQueue
from batonlm.rpc.convert import error_from_proto, token_ids_to_bytes
from batonlm.v1 import encode_pb2 as pb

GROUP_INPUTS = 64
GROUP_BYTES = 1 << 14
"""Most of a call: tenants take turns between calls, and another worker may take the next one."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """What was computed for a request's inputs."""

    model: ModelDescription
    numbers: tuple[bytes, ...]
    """Of each input, in order: its vector, or its one score, as little-endian float32."""
    num_tokens: int
    """Of all inputs."""
    request_id: str = ""


class Encoders:
    """Computes requests' inputs on encode workers, and retries on another one when one fails."""

    def __init__(self, fleet: Fleet, config: RouterConfig, budget: RetryBudget) -> None:
        self._fleet = fleet
        self._config = config
        self._queue = WorkQueue(
            fleet.encodes,
            fleet.changed,
            config,
            budget,
            fits=lambda worker, digest: worker.model.digest == digest,
        )

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a worker."""
        return self._queue.num_waiting

    def models(self) -> list[ModelDescription]:
        """The models that can be requested now."""
        return models_of(self._fleet.encodes.snapshots())

    async def model(self, name: str, task: ModelTask) -> ModelDescription:
        """Returns the model to use; waits while there is no worker. Without a name: the only one
        for the task. A model of vectors scores, too, by their cosine. Raises BatonError."""
        fleet = self._fleet
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._config.wait_timeout_s
        while True:
            models = self.models()
            fitting = [model for model in models if model.task is task]
            if task is ModelTask.SCORE:
                fitting += [model for model in models if model.task is ModelTask.EMBED]
            if chosen := [model for model in fitting if name in ("", model.name)]:
                return chosen[0]
            if models:
                raise model_not_found(name, {model.name for model in fitting})
            if not fleet.encodes.awaited:
                raise NotFound("This server has no encode workers: it makes no vectors or scores.")
            left = give_up - loop.time()
            if left <= 0:
                raise fleet.encodes.absent()
            await fleet.changed.wait(left)

    async def run(
        self,
        prompt: VectorPrompt,
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        on_turn: Callable[[], None] = lambda: None,
        on_served: Callable[[WorkerIdentity], None] = lambda _: None,
    ) -> Vectors:
        """Computes all inputs, in calls that run side by side as far as workers have room. Raises
        BatonError, naming the first input that is invalid."""
        tasks: list[asyncio.Task[Sequence[pb.VectorOutput]]] = []

        async def group(
            start: int, inputs: Sequence[VectorInput], size: int
        ) -> Sequence[pb.VectorOutput]:
            request = pb.EncodeRunRequest(
                inputs=map(_to_proto, inputs),
                dimensions=prompt.dimensions,
                truncate_tokens=prompt.truncate_tokens,
                prompt_name=prompt.prompt_name,
            )
            lane = Lane.LONG if size >= LONG_BYTES else Lane.SHORT
            outputs, worker = await self._queue.run(
                model.digest, asked_by, lane, size,
                lambda client: partial(client.run_batch, request), on_turn,
            )  # fmt: skip
            on_served(worker.identity)
            for index, output in enumerate(outputs, start):
                if output.HasField("error"):
                    raise _of_input(error_from_proto(output.error), prompt, index)
            return outputs

        try:
            async with asyncio.TaskGroup() as together:
                for start, inputs, size in _groups(prompt.inputs):
                    tasks.append(together.create_task(group(start, inputs, size)))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        outputs = [output for task in tasks for output in task.result()]
        return Vectors(
            model,
            tuple(output.numbers for output in outputs),
            sum(output.num_tokens for output in outputs),
            asked_by.request_id,
        )

    async def close(self) -> None:
        """Stops the queue. Waiting work is ended by its own requests."""
        await self._queue.close()


def floats(numbers: bytes) -> array[float]:
    """Returns little-endian float32 numbers."""
    found = array("f", numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def input_bytes(given: VectorInput) -> int:
    """The size of an input as it is sent."""
    match given:
        case str():
            return len(given.encode())
        case TextPair(query, document):
            return len(query.encode()) + len(document.encode())
        case _:
            return TOKEN_ID_BYTES * len(given)


def _groups(inputs: Sequence[VectorInput]) -> Iterator[tuple[int, Sequence[VectorInput], int]]:
    """Splits inputs into calls: the index of the first one, the inputs, and their bytes."""
    start = size = 0
    for index, given in enumerate(inputs):
        own = input_bytes(given)
        if index > start and (size + own > GROUP_BYTES or index - start == GROUP_INPUTS):
            yield start, inputs[start:index], size
            start, size = index, 0
        size += own
    yield start, inputs[start:], size


def _to_proto(given: VectorInput) -> pb.VectorInput:
    match given:
        case str():
            return pb.VectorInput(text=given)
        case TextPair(query, document):
            return pb.VectorInput(pair=pb.TextPair(query=query, document=document))
        case _:
            return pb.VectorInput(token_ids=token_ids_to_bytes(given))


def _of_input(error: BatonError, prompt: VectorPrompt, index: int) -> BatonError:
    """Returns a worker's error about one input with its number, where there are several."""
    if error.field != "input":
        return error
    field = "documents" if prompt.scores else "inputs"
    number = f"[{index}]" if prompt.scores or len(prompt.inputs) > 1 else ""
    return from_reason(error.reason, f"{field}{number} {error.message}", field=field)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure of one call, after which the others were cancelled."""
    found: BaseException = failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
