"""The settings of a simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton_loadtest.simulator.prompts import VOCABULARY
from batonlm.core.admission.concurrency_limiter import (
    FIRST_WINDOW,
    LARGEST_WINDOW,
    WINDOW_STEP,
    ConcurrencyLimiter,
)
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.model import KvLayout, ModelDescription
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.routing.routing import RoutingPolicy
from batonlm.core.scheduler.policy import PREFILL, QueueLimit, SchedulerPolicy


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The workers of one role. Fields without a description are a worker's options."""

    speed: WorkerSpeed
    """Step durations, which workers also report."""
    num_blocks: int
    block_size: int = 16
    step_tokens: int = 512
    """Maximum number of prompt tokens that a step computes."""
    max_running: int = 64
    batch_window_s: float = 0.002
    drafts_right: float = 0.0
    """The probability that a draft is right if those before it are, of workers that draft; 0: they
    don't. Not an option of workers, for which it depends on the text."""
    draft_s: float = 0.0
    """What a draft adds to a decode step, in seconds; 0: as much as a sequence more."""
    reported: WorkerSpeed = field(init=False)
    """The speed as workers report it."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for name in ("num_blocks", "block_size", "step_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise InvalidArgument("must be at least 1", field=name)
        if self.step_tokens < self.block_size:
            raise InvalidArgument("must be at least one block", field="step_tokens")
        for name in ("batch_window_s", "draft_s"):
            if getattr(self, name) < 0.0:
                raise InvalidArgument("must not be below 0", field=name)
        if not 0.0 <= self.drafts_right <= 1.0:
            raise InvalidArgument("must be from 0 to 1", field="drafts_right")
        reported = replace(self.speed, prefill_step_tokens=self.step_tokens)
        object.__setattr__(self, "reported", reported)

    def prefill_policy(self) -> SchedulerPolicy:
        return replace(
            PREFILL,
            token_budget=self.step_tokens,
            batch_window_s=self.batch_window_s,
            limit=QueueLimit(2 * self.step_tokens),
        )

    def decode_policy(self) -> SchedulerPolicy:
        return SchedulerPolicy(
            max_sequences=self.max_running,
            token_budget=self.max_running + self.step_tokens,
            prefill_budget=self.step_tokens,
            limit=QueueLimit(2 * self.step_tokens),
        )


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """The router's options. Several routers are simulated as one with their total window and
    queue."""

    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    routers: int = 1
    """Number of routers that share the traffic."""
    max_queue_s: float = 10.0
    """How long a request may wait in the queue."""
    max_queued: int = 1024
    max_queued_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        if self.routers < 1:
            raise InvalidArgument("must be at least 1", field="routers")
        if self.max_queue_s <= 0.0:
            raise InvalidArgument("must be more than 0", field="max_queue_s")

    def window(self) -> ConcurrencyLimiter:
        """Returns the limiter in its initial state."""
        many = self.routers
        return ConcurrencyLimiter(many * FIRST_WINDOW, many * WINDOW_STEP, many * LARGEST_WINDOW)


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays in seconds."""

    hop_s: float = 0.001
    """Of any message between processes."""
    report_s: float = 0.05
    """Interval at which workers check for news to report."""
    heartbeat_s: float = 0.5
    """Interval of reports without news."""
    tokenize_s: float = 0.0
    """From a request's arrival until its tokens are known."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for name in ("hop_s", "tokenize_s"):
            if getattr(self, name) < 0.0:
                raise InvalidArgument("must not be below 0", field=name)
        for name in ("report_s", "heartbeat_s"):
            if getattr(self, name) <= 0.0:
                raise InvalidArgument("must be more than 0", field=name)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A fleet. Without prefill workers, decode workers prefill their requests (aggregated)."""

    prefill: WorkerFacts
    decode: WorkerFacts
    prefills: int
    """Number of prefill workers."""
    decodes: int
    """Number of decode workers."""
    kv_bytes: int
    """Bytes of one position on the wire."""
    max_model_len: int = 131072
    router: RouterFacts = field(default_factory=RouterFacts)
    delays: Delays = field(default_factory=Delays)
    skip: bool = True
    """Take quiet decode steps at once instead of one by one; the results are the same."""
    model: ModelDescription = field(init=False)
    layout: KvLayout = field(init=False)
    """The same for all workers: only the size in bytes matters, which kv_bytes defines."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument with the field."""
        model = ModelDescription(
            "simulated", "model", self.max_model_len, VOCABULARY, (), "tokenizer"
        )
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "layout", KvLayout("model", "float16", 1, 1, 1, 1))
        if self.prefills < 0:
            raise InvalidArgument("must not be below 0", field="prefills")
        for name in ("decodes", "kv_bytes", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument("must be at least 1", field=name)
        # A measurement may attribute all of a step's time to its sequences.
        if self.decode.speed.decode_s(1, 1) <= 0.0:
            raise InvalidArgument("a decode step must take time", field="decode.speed.step_s")
        if not self.decode.speed.prefills:
            raise InvalidArgument("is not known of decode", field="decode.speed.prefill_position_s")
        if self.prefills:
            if not self.prefill.speed.prefills:
                raise InvalidArgument("is not known", field="prefill.speed.prefill_position_s")
            for name in ("link_bytes_per_s", "handover_s"):
                if getattr(self.decode.speed, name) <= 0.0:
                    raise InvalidArgument(
                        "must be more than 0 where prefill is apart", field=f"decode.speed.{name}"
                    )
