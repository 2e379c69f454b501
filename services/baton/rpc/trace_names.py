"""Every name that Baton's spans use: spans, attributes and events.

Those with a dot behind `gen_ai` are OpenTelemetry's conventions for generative AI, which still
change; ours begin with `baton`. No attribute holds text of a client's but the model's name and the
request's parameters that are numbers.
"""

from __future__ import annotations

SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"
BATON = "baton"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

TENANT = "baton.tenant"
ATTEMPTS = "baton.attempts"
MOVES = "baton.moves"
KV_BYTES = "baton.transfer.bytes"

FIRST_TOKEN = "baton.first_token"
"""Event: the client's first text is there."""

SCORE = "score_prompt"
"""Span of the router: how likely the prompt is, before its attempts."""

ATTEMPT = "attempt"
"""Span of the router, one an attempt; what its workers do is below it."""
ATTEMPT_NUMBER = "baton.attempt.number"
ATTEMPT_REASON = "baton.attempt.reason"
ATTEMPT_MOVED = "baton.attempt.moved"
ATTEMPT_POSITION = "baton.attempt.position"
ATTEMPT_TOKENS = "baton.attempt.input_tokens"
PREFILL_WORKER = "baton.prefill.instance_id"
DECODE_WORKER = "baton.decode.instance_id"

ENCODE = "tokenizer.encode"
TO_TEXT = "tokenizer.decode"

PREFILL_RUN = "prefill.run"
PREFILL_QUEUE = "prefill.queue"
PREFILL_COMPUTE = "prefill.compute"
WORKER_CACHED_TOKENS = "baton.cached_tokens"

GIVE = "handover.give"
COLLECT = "handover.collect"

DECODE_RUN = "decode.run"
DECODE_PREFILL = "decode.prefill"
GENERATE = "decode.generate"

TEXT = "detokenizer.text"
TEXT_TOKENS = "baton.text.tokens"
