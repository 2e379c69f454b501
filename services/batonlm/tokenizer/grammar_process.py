"""A process that compiles grammars, given as lines of JSON. It may be killed at any time.

A grammar that exceeds the CPU time or memory ends the process: a compilation cannot be interrupted
in any other way.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from llguidance import LLTokenizer

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Grammar, GrammarKind
from batonlm.grammar.compiler import compile_grammar, load_vocabulary

NICENESS = 5
"""Encoding of prompts has precedence."""

OUT_OF_MEMORY = 77
"""Exit code; native code without memory aborts instead."""


def main(folder: str, special: str, cpu_s: str, memory_bytes: str) -> None:
    """Answers {"error": text} to {"kind": name, "text": text}; an empty error means that the
    grammar compiles. special: a JSON list."""
    os.nice(NICENESS)
    _limit_memory(int(memory_bytes))
    tokenizer: LLTokenizer | None = None
    with suppress(InvalidArgument):  # llguidance does not support this tokenizer
        tokenizer = load_vocabulary(Path(folder), special=json.loads(special))
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        # SIGPROF's default action ends the process, even while native code runs.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        error = _try(tokenizer, Grammar(GrammarKind[asked["kind"]], asked["text"]))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps({"error": error}), flush=True)


def _try(tokenizer: LLTokenizer | None, grammar: Grammar) -> str:
    if tokenizer is None:
        return "cannot be followed with this model's tokenizer"
    try:
        compile_grammar(tokenizer, grammar)
    except InvalidArgument as wrong:
        return wrong.message
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except BaseException:  # a panic of the Rust library is not an Exception
        return "cannot be compiled"
    return ""


def _limit_memory(size: int) -> None:
    """Limits the heap to `size` bytes; mapped files do not count. When the machine runs out of
    memory, the kernel kills this process first."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
