"""One process that renders chats, told by lines of JSON; whoever started it may kill it any time.

It limits itself before it reads anything: memory, no files, no further processes, and CPU time for
each line. A template that takes more than it may ends the process where nothing milder does.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from jinja2 import TemplateSyntaxError

from baton.core.errors import InvalidArgument
from baton.tokenizer.chat import ChatTemplate, Sandbox, not_accepted
from baton.tokenizer.renderers import OUT_OF_MEMORY, Job, Reply, Setup

_HARD_CPU = 2.0
_HARD_CPU_S = 0.2
"""Beyond what a template may take: reading the line and writing the answer take some, too."""


def main(cpu_s: str, max_characters: str, memory_bytes: str) -> None:
    sandbox = Sandbox()
    decoder = msgspec.json.Decoder(Job)
    encoder = msgspec.json.Encoder()
    _limit(int(memory_bytes))
    said, sys.stdout = sys.stdout.buffer, sys.stderr
    said.write(b"{}\n")
    said.flush()
    template: ChatTemplate | None = None
    hard_s = _HARD_CPU * float(cpu_s) + _HARD_CPU_S
    for line in sys.stdin.buffer:
        # Its default action ends the process, whatever native code runs just then.
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
        except RecursionError:  # of values so deep that no template is asked
            refusal = not_accepted()
            reply = Reply(message=refusal.message, field=refusal.field)
        said.write(encoder.encode(reply) + b"\n")
        said.flush()
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _compiled(setup: Setup, sandbox: Sandbox) -> ChatTemplate:
    """Raises InvalidArgument (`template`), also where only compiling it is too much."""
    try:
        return ChatTemplate(setup, sandbox.from_string(setup.source), sandbox)
    except TemplateSyntaxError as error:
        message = f"is broken at line {error.lineno}"
    except MemoryError:
        message = "takes too much memory"
    except Exception:  # what a template says is worked out while it is compiled, too
        message = "cannot be used"
    raise InvalidArgument(message, field="template") from None


def _limit(memory_bytes: int) -> None:
    """Where memory runs out before, this process goes first."""
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
