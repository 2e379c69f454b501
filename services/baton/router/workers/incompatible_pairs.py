"""Tells the log, once a pair, which workers cannot be paired and why; decides nothing."""

from __future__ import annotations

import logging
from collections import OrderedDict

from baton.core.handover.fit import refusal
from baton.core.routing.routing import Decision, FilterReason

log = logging.getLogger(__name__)

MAX_TOLD = 4096


class IncompatiblePairs:
    """An operator's mistake that costs no request: decode prefills by itself, only slower."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, decision: Decision) -> None:
        """Looks through the candidates of a decision."""
        if decision.decode is None:
            return
        for candidate in decision.candidates:
            if candidate.filter_reason is FilterReason.OTHER_LAYOUT:
                pair = candidate.identity.instance_id, decision.decode.instance_id
                if pair not in self._told:
                    error = refusal(candidate.identity, decision.decode, candidate.detail)
                    log.warning("%s (they are not paired)", error.message)
                self._told[pair] = None
                self._told.move_to_end(pair)
        while len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
