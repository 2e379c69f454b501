"""kubectl and helm as a user has them, within one namespace."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

COMMAND_S = 120.0
FORWARD_S = 120.0
ANSWER_S = 60.0

NO_ANSWER = (
    "Unable to connect to the server", "The connection to the server", "etcdserver: ",
    "Error from server (Timeout)",
)  # fmt: skip
"""What kubectl says when the API server, not the request, is at fault."""

_FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) ->")


class Failed(AssertionError):
    """A command that did not do what it should; says what it said."""


@dataclass(frozen=True)
class Cluster:
    """Whichever cluster KUBECONFIG names."""

    namespace: str

    def run(self, *command: str, timeout_s: float = COMMAND_S, text: str | None = None) -> str:
        """What it prints. text: its input. Raises Failed, also when it takes too long."""
        try:
            done = subprocess.run(
                command,
                input=text,
                stdin=subprocess.DEVNULL if text is None else None,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{' '.join(command)}: not done within {timeout_s:.0f} s") from error
        if done.returncode:
            raise Failed(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def kubectl(self, *words: str, timeout_s: float = COMMAND_S, text: str | None = None) -> str:
        return self.run("kubectl", "-n", self.namespace, *words, timeout_s=timeout_s, text=text)

    def helm(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        return self.run("helm", "-n", self.namespace, *words, timeout_s=timeout_s)

    def get(self, *words: str) -> dict[str, Any]:
        """What there is. An API server whose node is too busy to answer is asked again."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
                return found
            except Failed as error:
                if time.monotonic() > until or not any(each in str(error) for each in NO_ANSWER):
                    raise
            time.sleep(1)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Those that nobody has asked to leave."""
        found = self.get("pods", "-l", selector)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def nodes_ready_since(self) -> dict[str, str]:
        """When each node last became Ready, or ceased to be, by its name."""
        return {
            node["metadata"]["name"]: condition["lastTransitionTime"]
            for node in self.get("nodes")["items"]
            for condition in node["status"]["conditions"]
            if condition["type"] == "Ready"
        }

    def execute(self, pod: str, *command: str, timeout_s: float = COMMAND_S) -> str:
        """What a command prints that runs in a pod."""
        return self.kubectl("exec", pod, "--", *command, timeout_s=timeout_s)

    @asynccontextmanager
    async def forward(self, target: str, port: int) -> AsyncIterator[int]:
        """A port of this machine that leads to one of a pod or of a Service's pods."""
        process = await asyncio.create_subprocess_exec(
            "kubectl", "-n", self.namespace, "port-forward", target, f":{port}",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield await asyncio.wait_for(_forwarded(process), FORWARD_S)
        finally:
            if process.returncode is None:
                process.kill()
            # What it still says is read, so that its pipe is closed with it.
            await process.communicate()

    def story(self) -> str:
        """What one would look at when something here does not come up."""
        said = []
        for words in (
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", "app.kubernetes.io/part-of=baton", "--tail=20", "--prefix"),
        ):
            try:
                said.append(self.kubectl(*words))
            except Failed as error:
                said.append(str(error))
        return "\n".join(said)


async def _forwarded(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    said = b""
    while line := await process.stdout.readline():
        if found := _FORWARDING.match(line):
            return int(found[1])
        said += line
    raise Failed(f"kubectl port-forward: {said.decode(errors='replace')}")
