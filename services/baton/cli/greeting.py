"""What `baton up` says once everything is ready: how to ask it; asks nothing itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from baton.cli import state
from baton.cli.access import KEY_VARIABLE


def greeting(description: dict[str, Any], model: str, *, keys: bool) -> str:
    """description: as `Supervisor.description` gives it. keys: clients have to show one."""
    name = os.path.basename(sys.argv[0]) if sys.argv[0].endswith("baton") else "baton"
    command = sys.argv[0] if "/" in sys.argv[0] and name == "baton" else name
    http, ca = description["http"], description.get("ca", "")
    trust = f"--cacert {ca} " if ca else ""
    header = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if keys else ""
    key = f'os.environ["{KEY_VARIABLE}"]' if keys else '"none"'
    python = f"  # SSL_CERT_FILE={ca} python ...\n" if ca else ""
    return f"""
Baton answers at {http} (OpenAI HTTP) and {description["grpc"]} (gRPC).
Chat in a browser at {http}/, or ask from here:

  {command} chat "What is the capital of France?"

  curl {trust}{http}/v1/chat/completions{header} -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is 3 + 4?"}}]}}'

{python}  from openai import OpenAI
  client = OpenAI(base_url="{http}/v1", api_key={key})
  print(client.chat.completions.create(model="{model}", messages=[
      {{"role": "user", "content": "Who are you?"}}]).choices[0].message.content)

Stop it: {command} down      Logs: {state.log_file()}"""
