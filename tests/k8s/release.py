"""One Baton that helm installs, and how to ask about it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from batonlm.cli.http_client import total
from tests.k8s.charts import CHART, COMPONENTS, CPU, ENGINES
from tests.k8s.cluster import Cluster, Failed

INSTALL_S = 300.0
ROLLOUT_S = 300.0
METRICS_PORT = 9090
DISK_MIB = 64
"""Of the node's disk, for each decode pod that has this limit."""

# Printed by a pod about itself: the images have no tool that fetches.
_SCRAPE = (
    "import urllib.request as r;"
    f"print(r.urlopen('http://127.0.0.1:{METRICS_PORT}/metrics', timeout=10).read().decode())"
)

# Runs in a container: of all that is in it, what is Baton's is the largest, and goes first.
_TAKE_ALL_MEMORY = """
import os, time
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (os.getpid(), 1):
        open(f"/proc/{name}/oom_score_adj", "w").write("1000")
while True:
    if not os.fork():
        held = os.urandom(1 << 24)
        time.sleep(600)
    time.sleep(0.01)
"""


@dataclass
class Release:
    """name: as helm knows it. images: of the light processes, and of the engines."""

    cluster: Cluster
    cpu_image: str
    engine_image: str
    name: str = "baton"
    values: dict[str, str] = field(default_factory=dict)

    def install(self, timeout_s: float = INSTALL_S) -> None:
        """With the CPU preset; returns when helm finds all of it ready."""
        self._helm("install", timeout_s)

    def upgrade(self, values: Mapping[str, str], timeout_s: float = INSTALL_S) -> None:
        """values: beside those that hold so far, and for good."""
        self.values |= values
        self._helm("upgrade", timeout_s)

    def test(self, timeout_s: float = INSTALL_S) -> str:
        return self.cluster.helm("test", self.name, timeout_s=timeout_s)

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", self.name, "--wait", timeout_s=INSTALL_S)

    def scale(self, component: str, replicas: int, timeout_s: float = ROLLOUT_S) -> None:
        """Returns when that many pods are ready; those that leave may still be leaving."""
        deployment = f"deployment/{self.object(component)}"
        self.cluster.kubectl("scale", deployment, f"--replicas={replicas}")
        self.rolled_out(component, timeout_s)

    def restart(self, component: str, timeout_s: float = ROLLOUT_S) -> None:
        """All pods of a component anew, in the order that its Deployment keeps."""
        self.cluster.kubectl("rollout", "restart", f"deployment/{self.object(component)}")
        self.rolled_out(component, timeout_s)

    def rolled_out(self, component: str, timeout_s: float = ROLLOUT_S) -> None:
        self.cluster.kubectl(
            "rollout", "status", f"deployment/{self.object(component)}",
            f"--timeout={timeout_s:.0f}s",
            timeout_s=timeout_s + 10,
        )  # fmt: skip

    def prefer_leaving(self, pods: Sequence[str]) -> None:
        """When its Deployment shrinks, these leave first."""
        names = [f"pod/{name}" for name in pods]
        self.cluster.kubectl(
            "annotate", "--overwrite", *names, "controller.kubernetes.io/pod-deletion-cost=-1"
        )

    def take_all_memory(self, pod: str) -> None:
        """Until the kernel ends the container's process for it."""
        with suppress(Failed):
            self.cluster.execute(pod, "python", "-c", _TAKE_ALL_MEMORY)
        for condition in (
            "jsonpath={.status.containerStatuses[0].restartCount}=1", "condition=Ready",
        ):  # fmt: skip
            self.cluster.kubectl(
                "wait", f"pod/{pod}", f"--for={condition}", f"--timeout={ROLLOUT_S:.0f}s",
                timeout_s=ROLLOUT_S + 10,
            )  # fmt: skip

    def fill_disk(self, pod: str) -> None:
        """Writes more than the pod's limit, and returns when the kubelet has evicted it."""
        write = f"open('/tmp/full', 'wb').write(b'x' * {2 * DISK_MIB << 20})"
        # It may end with the pod.
        with suppress(Failed):
            self.cluster.execute(pod, "python", "-c", write)
        # A process that ends well for it leaves a pod that has not failed.
        until = time.monotonic() + ROLLOUT_S
        evicted = ("--field-selector", f"involvedObject.name={pod},reason=Evicted")
        while not self.cluster.get("events", *evicted)["items"]:
            assert time.monotonic() < until, f"{pod} is not evicted"
            time.sleep(1)
        ended = ("--for=jsonpath={.status.containerStatuses[0].state.terminated}", f"pod/{pod}")
        self.cluster.kubectl(
            "wait", *ended, f"--timeout={ROLLOUT_S:.0f}s", timeout_s=ROLLOUT_S + 10
        )

    def last_end(self, pod: str) -> str:
        """Why the container's process before this one ended."""
        (status,) = self.cluster.get("pod", pod)["status"]["containerStatuses"]
        return str(status["lastState"]["terminated"]["reason"])

    def object(self, component: str) -> str:
        """What the chart calls a component's objects. The release is called like the chart."""
        return f"{self.name}-{component}"

    def pods(self, component: str) -> list[dict[str, Any]]:
        return self.cluster.pods(
            f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        )

    def check_never_restarted(self, component: str) -> None:
        for pod in self.pods(component):
            name = pod["metadata"]["name"]
            for status in pod["status"]["containerStatuses"]:
                if status["restartCount"]:  # how it ended is lost with its pod
                    log = self.cluster.kubectl("logs", "--previous", name, "-c", status["name"])
                    raise AssertionError(f"{name} ended: {status['lastState']}\n{log}")

    def pod_names(self, component: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(component)]

    def metrics(self, pod: str) -> dict[str, float]:
        """All samples of a pod, as it tells them."""
        said = self.cluster.execute(pod, "python", "-c", _SCRAPE).splitlines()
        pairs = (line.rsplit(" ", 1) for line in said if line and not line.startswith("#"))
        return {sample: float(value) for sample, value in pairs}

    def metric(self, component: str, name: str, *labels: str) -> float:
        """The sum over a component's pods that are ready."""
        found = 0.0
        for pod in filter(_is_ready, self.pods(component)):
            try:
                found += total(self.metrics(pod["metadata"]["name"]), name, *labels)
            except Failed:
                # One that leaves meanwhile does not count.
                if pod["metadata"]["name"] in self.pod_names(component):
                    raise
        return found

    def service_address(self, port: str) -> str:
        """host:port of the router's Service, for those that its cluster lets in."""
        spec = self.cluster.get("service", self.object("router"))["spec"]
        number = next(one["port"] for one in spec["ports"] if one["name"] == port)
        return f"{spec['clusterIP']}:{number}"

    def _helm(self, verb: str, timeout_s: float) -> None:
        images = [("--set-string", key, value) for key, value in self._images().items()]
        values = [("--set", key, value) for key, value in self.values.items()]
        sets = [word for flag, key, value in images + values for word in (flag, f"{key}={value}")]
        try:
            self.cluster.helm(
                verb, self.name, str(CHART), "-f", str(CPU), *sets,
                "--wait", "--timeout", f"{timeout_s:.0f}s",
                timeout_s=timeout_s + 30,
            )  # fmt: skip
        except Failed as error:
            raise Failed(f"{error}\n{self.cluster.story()}") from error

    def _images(self) -> dict[str, str]:
        given = {}
        for component in COMPONENTS:
            image = self.engine_image if component in ENGINES else self.cpu_image
            repository, _, tag = image.rpartition(":")
            given[f"{component}.image.repository"] = repository
            given[f"{component}.image.tag"] = tag
        return given


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
