"""One chat over HTTP, for `helm test`: fails unless text comes back. Standard library only."""

import json
import os
import ssl
import sys
import urllib.request

URL, CA, KEY, QUESTION = (
    os.environ.get(name, "") for name in ("URL", "CA", "BATON_API_KEY", "QUESTION")
)


def ask(path: str, body: dict | None) -> bytes:
    headers = {"content-type": "application/json"}
    if KEY:
        headers["authorization"] = f"Bearer {KEY}"
    data = None if body is None else json.dumps(body).encode()
    trust = ssl.create_default_context(cafile=CA) if CA else None
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
        return answer.read()


ask("/health", None)
if QUESTION:
    said = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]})
    text = json.loads(said)["choices"][0]["message"]["content"]
    print(text)
    sys.exit(0 if text.strip() else "the answer is empty")
