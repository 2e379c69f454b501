"""What a gateway is told of this Baton: its model, its health, its load.

It is one engine of one model. KV is that of all decode workers; running and waiting are the
requests of this router.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from baton.core.admission.tenants import Tenant
from baton.core.errors import Unauthenticated, Unavailable, Unimplemented
from baton.core.request.model import ModelDescription
from baton.router.api.vllm.tokenizer_files import TokenizerFiles
from baton.router.observe.use import Use
from baton.router.request.pipeline import Pipeline

SERVER_TYPE = "baton"
FIRST_TOKEN = "first_token"
"""Where a grammar starts, in the protocol's words."""


class About:
    """files: of the tokenizer, where the operator gave them."""

    def __init__(self, pipeline: Pipeline, use: Use, files: TokenizerFiles | None) -> None:
        self._pipeline = pipeline
        self._use = use
        self._files = files
        self._since = time.monotonic()

    def check_single(self) -> None:
        """Raises Unimplemented where requests would have to name a model: they cannot."""
        if len(self._pipeline.models()) > 1:
            raise Unimplemented(
                "This router serves several models, and this protocol names none: give the router "
                "one of them with --model."
            )

    def model(self) -> ModelDescription:
        """The one that is served. Raises Unavailable while there is none, and Unimplemented."""
        self.check_single()
        for model in self._pipeline.models():
            return model
        raise Unavailable("No worker is ready.", retry_after_s=1.0)

    def health(self) -> pb.HealthCheckResponse:
        ready = self._pipeline.ready()
        said = "Requests can be answered." if ready else "No request can be answered now."
        return pb.HealthCheckResponse(healthy=ready, message=said)

    def model_info(self) -> pb.GetModelInfoResponse:
        """Raises BatonError."""
        model = self.model()
        config = self._files.model if self._files else {}
        architectures = config.get("architectures")
        # Where a path is told, gateways ask here for the tokenizer, and never look in a folder of
        # their own: so it is told only where they can have it.
        source = model.name if self._files else ""
        return pb.GetModelInfoResponse(
            model_path=source,
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=source,
            model_type=str(config.get("model_type", "")),
            architectures=map(str, architectures) if isinstance(architectures, list) else (),
            eos_token_ids=model.eos_token_ids,
            max_req_input_len=model.max_model_len - 1,
        )

    def server_info(self, caller: Tenant) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._pipeline.num_requests if caller.sees_others else 0,
            uptime_seconds=time.monotonic() - self._since,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=sum(told.max_sequences for _, told, _ in self._use.decodes()),
            constrained_decoding_start=FIRST_TOKEN,
        )

    def loads(self, caller: Tenant) -> pb.GetLoadsResponse:
        """Raises Unauthenticated: it tells of all tenants together."""
        if not caller.sees_others:
            raise Unauthenticated("The load is told to an operator's key only.")
        running, waiting = self._use.running().total(), self._use.waiting().total()
        positions = used = sequences = 0
        for _, told, load in self._use.decodes():
            positions += told.num_blocks * told.block_size
            used += (told.num_blocks - load.free_blocks) * told.block_size
            sequences += told.max_sequences
        usage = used / positions if positions else 0.0
        load_now = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=positions,
            token_usage=usage,
            utilization=usage,
            max_running_requests=sequences,
            num_waiting_uncached_tokens=self._use.waiting_tokens(),
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("baton"),
            dp_rank_count=1,
            loads=[load_now],
        )
