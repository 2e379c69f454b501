"""Records, what a router remembers of its requests and tells of their use; knows neither HTTP nor
files."""

from __future__ import annotations

import time
from typing import Protocol

from baton.core.admission.tenants import Tenant
from baton.core.observe.request_history import RequestHistory
from baton.core.observe.request_record import RequestRecord
from baton.core.request.request import ChatPrompt, Request, TextPrompt
from baton.router.config import RouterConfig
from baton.router.observe.stage_timer import StageTimer


class UsageSink(Protocol):
    """Takes a record of each request that was let in and is over. Returns at once."""

    def over(self, record: RequestRecord) -> None: ...


class Records:
    """One per router. usage: None: nobody bills. Requests that are not let in leave no record."""

    def __init__(self, config: RouterConfig, usage: UsageSink | None = None) -> None:
        self._config = config
        self._usage = usage
        self.history = RequestHistory(config.num_remembered, config.request_history_bytes)

    def begin(self, request: Request, request_id: str, stages: StageTimer) -> None:
        """A request was let in; from now on its stages tell its record too."""
        if self._usage is None and not self._config.num_remembered:
            return
        stages.record = RequestRecord(
            request_id=request_id,
            tenant=request.tenant.name,
            arrived_at=time.time(),
            asked=_asked(request),
            priority=request.priority,
            policy=self._config.routing,
            split=bool(self._config.prefills),
            clock=stages,
            model=request.model,
        )
        self.history.begin(stages.record)

    def end(self, stages: StageTimer) -> None:
        """The request is over, and its stages know."""
        if stages.record is None:
            return
        self.history.end(stages.record)
        if self._usage is not None:
            self._usage.over(stages.record)

    def find(self, request_id: str, tenant: Tenant) -> RequestRecord:
        """A tenant's own request, or an operator's any. Raises NotFound."""
        return self.history.find(request_id, None if tenant.operator else tenant.name)


def _asked(request: Request) -> str:
    match request.prompt:
        case ChatPrompt():
            return "chat"
        case TextPrompt():
            return "text"
        case _:
            return "tokens"
