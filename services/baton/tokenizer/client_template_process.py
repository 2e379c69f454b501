"""Renders one client's template after the other, as JSON lines; the other end may kill it any time.

It limits itself before it reads anything: memory, no files, no further processes.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from jinja2 import TemplateSyntaxError

from baton.tokenizer.sandbox import OverBudget, Sandbox

MEMORY_BYTES = 1 << 29


def main() -> None:
    sandbox = Sandbox()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    said, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=said, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(sandbox, json.loads(line))), file=said, flush=True)


def _answer(sandbox: Sandbox, job: dict[str, Any]) -> dict[str, Any]:
    try:
        template = sandbox.from_string(job["source"])
        text = sandbox.render(
            template,
            job["variables"],
            cpu_s=job["cpu_s"],
            max_characters=job["max_characters"],
        )
    except TemplateSyntaxError as error:
        return {"line": error.lineno}
    except (OverBudget, MemoryError):
        return {"over_budget": True}
    except Exception:  # a template can raise anything
        return {"failed": True}
    return {"text": text}


if __name__ == "__main__":
    main()
