"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter as in vLLM's API, for operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from batonlm.core.errors import BatonError
from batonlm.router.api.http.access import caller, operator_key_required
from batonlm.router.api.http.body import Bodies
from batonlm.router.api.http.responses import send_parts
from batonlm.router.api.http.schema import (
    LoadAdapterBody,
    UnloadAdapterBody,
    client_names,
    decode,
)
from batonlm.router.api.translation import in_client_words
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.adapters import AdapterManager


@dataclass(frozen=True, slots=True)
class AdapterRoute:
    """An ASGI app that answers bodies of one kind, in words as vLLM does."""

    pipeline: Pipeline
    bodies: Bodies
    kind: type[LoadAdapterBody] | type[UnloadAdapterBody]
    change: Callable[[AdapterManager, Any], Awaitable[str]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not caller(scope).operator:
            await self.bodies.discard(scope, receive)
            raise operator_key_required("Adapters are everybody's")
        async with self.bodies.received(scope, receive) as body:
            try:
                given, _ = decode(body.raw, self.kind)
                words = await self.change(self.pipeline.adapter_manager, given)
            except BatonError as error:
                raise in_client_words(error, client_names(self.kind)) from error
        await send_parts(send, [words.encode()], kind=b"text/plain; charset=utf-8")


async def load_adapter(manager: AdapterManager, body: LoadAdapterBody) -> str:
    await manager.load(body.name, body.path, model=body.model or "", replace=bool(body.replace))
    return f"Success: LoRA adapter '{body.name}' added successfully."


async def unload_adapter(manager: AdapterManager, body: UnloadAdapterBody) -> str:
    await manager.unload(body.name, model=body.model or "")
    return f"Success: LoRA adapter '{body.name}' removed successfully."
