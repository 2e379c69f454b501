"""The `tokenizers` library called in one process and one thread, as one would without Baton.

Encoding is its fastest call for a batch, `encode_batch_fast`, and the ids as a list; decoding is
its own stream for text that grows, `DecodeStream`.
"""

from __future__ import annotations

import os
import time
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: `tokenizer`, a file; `batches`, texts by name, each a list of batches; `ids`, to decode;
    `seconds` of processor time for each.

    Answers `encode`, bytes per second of processor time by name, and `decode`, tokens per second.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(job["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return {
        "encode": {
            name: _encode(tokenizer, batches, job["seconds"])
            for name, batches in job["batches"].items()
        },
        "decode": _decode(tokenizer, job["ids"], job["seconds"]) if job["ids"] else 0.0,
    }


def _encode(tokenizer: Any, batches: list[list[str]], seconds: float) -> float:
    sizes = [sum(len(text.encode()) for text in batch) for batch in batches]

    def turn(until: float) -> int:
        done = number = 0
        while not done or time.process_time() < until:
            batch = batches[number % len(batches)]
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=True):
                _ = encoding.ids
            done += sizes[number % len(batches)]
            number += 1
        return done

    return _rate(turn, seconds)


def _decode(tokenizer: Any, ids: list[int], seconds: float) -> float:
    from tokenizers.decoders import DecodeStream

    def turn(until: float) -> int:
        done = 0
        while not done or time.process_time() < until:
            stream = DecodeStream(skip_special_tokens=True)
            for token_id in ids:
                stream.step(tokenizer, token_id)
            done += len(ids)
        return done

    return _rate(turn, seconds)


def _rate(turn: Any, seconds: float) -> float:
    turn(time.process_time() + seconds / 8)
    began = time.process_time()
    done = turn(began + seconds)
    return float(done / (time.process_time() - began))
