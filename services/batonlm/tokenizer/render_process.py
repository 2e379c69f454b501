"""A process that renders chats, given as lines of JSON. It may be killed at any time.

It limits itself before it reads any input: memory, no file writes, no further processes, and CPU
time for each line. A template that exceeds them, and that the sandbox cannot stop, ends the
process.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from jinja2 import TemplateSyntaxError

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.validation import wrong
from batonlm.tokenizer.chat import ChatTemplate, Sandbox, not_accepted
from batonlm.tokenizer.renderers import OUT_OF_MEMORY, RenderJob, Reply, Setup

_HARD_CPU = 2.0
_HARD_CPU_S = 0.2
"""Added to a template's limit for reading the line and writing the answer."""


def main(cpu_s: str, max_characters: str, memory_bytes: str) -> None:
    sandbox = Sandbox()
    decoder = msgspec.json.Decoder(RenderJob)
    encoder = msgspec.json.Encoder()
    _limit(int(memory_bytes))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    answers.write(b"{}\n")
    answers.flush()
    template: ChatTemplate | None = None
    hard_s = _HARD_CPU * float(cpu_s) + _HARD_CPU_S
    for line in sys.stdin.buffer:
        # SIGPROF's default action ends the process, even while native code runs.
        signal.setitimer(signal.ITIMER_PROF, hard_s)
        sandbox.begin(cpu_s=float(cpu_s), max_characters=int(max_characters))
        try:
            job = decoder.decode(line)
            if job.setup is not None:
                template = _compiled(job.setup, sandbox)
            assert template is not None
            if job.chat is None:
                reply = Reply()
            else:
                rendered = template.render(job.chat)
                reply = Reply(rendered.text, rendered.own)
        except InvalidArgument as wrong:
            reply = Reply(message=wrong.message, field=wrong.field)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        except RecursionError:  # values nested too deeply, before the template runs
            refusal = not_accepted()
            reply = Reply(message=refusal.message, field=refusal.field)
        answers.write(encoder.encode(reply) + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _compiled(setup: Setup, sandbox: Sandbox) -> ChatTemplate:
    """Compiles a template. Raises InvalidArgument (`template`) when that fails or takes too much
    memory."""
    try:
        return ChatTemplate(setup, sandbox.from_string(setup.source), sandbox)
    except TemplateSyntaxError as error:
        message = f"is broken at line {error.lineno}"
    except MemoryError:
        message = "takes too much memory"
    except Exception:  # jinja2 evaluates constant expressions of a template when it compiles it
        message = "cannot be used"
    raise wrong("template", message) from None


def _limit(memory_bytes: int) -> None:
    """Sets the process's limits. When the machine runs out of memory, the kernel kills this process
    first."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))


if __name__ == "__main__":
    main(*sys.argv[1:])
