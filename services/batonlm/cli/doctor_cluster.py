"""`baton doctor cluster`: checks the Kubernetes API, this pod and the workers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from batonlm.cli import checks
from batonlm.cli.checks import Check, Finding, fail, ok, warn
from batonlm.core.errors import BatonError, InvalidArgument, Unavailable, install
from batonlm.core.handover.fit import difference
from batonlm.core.routing.load import WorkerDescription
from batonlm.rpc.channels import Channels
from batonlm.rpc.kubernetes_api import KubernetesApi, NoAnswer, open_api
from batonlm.rpc.tls import Certificates
from batonlm.rpc.worker import description_from_proto
from batonlm.v1 import worker_pb2
from batonlm.v1.worker_pb2_grpc import WorkerStub


@dataclass(frozen=True, slots=True)
class Needs:
    """What a preset of the chart needs of a cluster."""

    gpu: bool = False
    rdma: bool = False
    pod_security: str = "restricted"
    """The strictest pod security level of a namespace that admits its pods."""


PRESETS = {
    "cpu": Needs(),
    "gpu-tcp": Needs(gpu=True),
    # Stricter levels do not allow locking memory (IPC_LOCK).
    "gpu-rdma": Needs(gpu=True, rdma=True, pod_security="privileged"),
}

LEVELS = ("privileged", "baseline", "restricted")
"""Levels of pod security, from the least to the most strict."""


TIMEOUT_S = (3.0, 10.0)
"""Time to connect, and time to receive the answer."""

Json = dict[str, Any]


class ApiAnswer(NamedTuple):
    """An answer of the Kubernetes API."""

    status: int
    """The HTTP status."""
    body: Json

    @property
    def items(self) -> list[Json]:
        return list(self.body.get("items") or ())


class Api:
    """The Kubernetes API, whole answers at a time."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self.namespace, self.in_pod = api.namespace, api.in_pod

    @classmethod
    def open(cls, kubeconfig: str = "") -> Api:
        """See `open_api`. Raises InvalidArgument, and Unavailable without the client library."""
        try:
            return cls(open_api(kubeconfig))
        except ImportError:
            raise Unavailable("the Kubernetes client is not installed") from None
        except ValueError:
            raise InvalidArgument(
                "must name a kubeconfig file: this is no pod with a service account, and no usable "
                "kubeconfig was found",
                field="kubeconfig",
            ) from None

    def get(self, path: str, **query: str) -> ApiAnswer:
        """Raises Unavailable if there is no answer; a refusal is an answer."""
        return self._ask("GET", path, query, None)

    def post(self, path: str, body: Json) -> ApiAnswer:
        """See `get`."""
        return self._ask("POST", path, {}, body)

    def _ask(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None
    ) -> ApiAnswer:
        try:
            answer = self._api.request(method, path, query, TIMEOUT_S, body)
            try:
                text = b"".join(answer.parts())
            finally:
                answer.close()
        except NoAnswer as failure:
            raise Unavailable(f"nobody answers: {failure}") from failure
        try:
            found = json.loads(text)
        except ValueError:
            found = {}
        return ApiAnswer(answer.status, found if isinstance(found, dict) else {})


API_NAME = "kubernetes.default.svc"


def local_dns(names: Sequence[str]) -> Finding:
    """names: DNS names of Services in this cluster."""
    missing = [name for name in (API_NAME, *names) if not _resolves(name)]
    if API_NAME in missing:
        return fail(
            f"{API_NAME} has no address: DNS does not work in this pod",
            "see the pods of CoreDNS in kube-system, and NetworkPolicies that forbid port 53",
        )
    if missing:
        return warn(
            f"no address yet: {', '.join(missing)}",
            "a headless Service has addresses once a pod of it runs",
        )
    return ok(f"{len(names) + 1} names have addresses")


def local_memory_lock(needs: Needs, limit: int | None = None) -> Finding:
    """limit: in bytes, -1 for unlimited; None: this process's own limit."""
    found = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if found in (-1, resource.RLIM_INFINITY):
        return ok("no limit on locked memory")
    detail = f"{found >> 10} KiB may be locked"
    if needs.rdma:
        return warn(
            detail,
            "RDMA locks the staging memory: raise the container runtime's LimitMEMLOCK (the "
            "capability IPC_LOCK has no effect on users other than root, as Baton's is)",
        )
    return ok(f"{detail}; TCP and shared memory need none")


def local_infiniband(needs: Needs, folder: str = "/dev/infiniband") -> Finding:
    files = sorted(path.name for path in Path(folder).glob("uverbs*"))
    if files:
        return ok(f"{folder} has {', '.join(files)}")
    if needs.rdma:
        return fail(
            f"{folder} has no uverbs device: this pod was given no RDMA",
            "ask for the device plugin's rdma/* resource in this pod as prefill and decode do",
        )
    return ok("no RDMA device in this pod, and none is needed")


def local_gpu_driver(needs: Needs, root: str = "/") -> Finding:
    driver = Path(root, "proc/driver/nvidia/version")
    devices = sorted(path.name for path in Path(root, "dev").glob("nvidia[0-9]*"))
    if devices and driver.exists():
        words = driver.read_text().split("  ")
        return ok(f"{len(devices)} GPUs in this pod, {words[1].strip() if words[1:] else 'driver'}")
    if needs.gpu:
        return warn(
            "no GPU in this pod",
            "to try one, run the doctor with a limit of nvidia.com/gpu: 1 and, where the cluster "
            "needs it, runtimeClassName nvidia",
        )
    return ok("none in this pod, and none is needed")


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


MOST_TOLD = 8

ADVICE = {
    "Unschedulable": "free or add what the scheduler misses, or change nodeSelector, tolerations "
    "and resources of that component",
    "ErrImagePull": "see that the image's name is right and that the nodes can pull it "
    "(imagePullSecrets)",
    "ErrImageNeverPull": "load the image into the nodes, or set image.pullPolicy",
    "InvalidImageName": "correct the image's name in the values",
    "CreateContainerConfigError": "a Secret or ConfigMap that the values name is missing",
    "CreateContainerError": "see 'kubectl describe pod'",
    "OOMKilled": "raise the component's memory limit, or lower its kv_memory_mib",
    "Unhealthy": "its health says so: see 'kubectl logs'",
}
ADVICE["ImagePullBackOff"] = ADVICE["ErrImagePull"]

EXIT_CODES = {
    1: "it crashed, or did not drain in time",
    2: "a wrong configuration",
    3: "a failure that start-up foresees",
    4: "its KV ring was worn out",
    137: "killed: a memory limit, or a liveness probe",
}
"""Exit codes of Baton's processes, and of killed ones."""


QUOTA = (
    "raise the quota, or ask for less: resources and replicaCount of that component; "
    "'kubectl describe quota' says what is used"
)
REFUSED = {
    "exceeded quota": QUOTA,
    "must specify": QUOTA,
    "violates PodSecurity": "label the namespace with a level that admits these pods, or leave out "
    "what it refuses (hostPath, IPC_LOCK, hostNetwork)",
    "maximum": "ask for less than the namespace's LimitRange allows",
    "serviceaccount": "the account is missing: was a part of the release deleted?",
    "PriorityClass": "make the class, or set priorityClasses.create",
}
"""Words of the API server's refusals of pods, and what to do."""


def pools(owners: Sequence[Json], events: Sequence[Json]) -> Finding:
    """Explains why a pool has fewer pods than it should, where the API server refuses to make them.

    owners: Deployments, StatefulSets and LeaderWorkerSets of a release. events: warnings of the
    namespace, in which refusals are about the ReplicaSet or StatefulSet below an owner.
    """
    if not owners:
        return ok("none is installed here")
    refused: dict[str, str] = {}
    for owner in owners:
        status = owner.get("status", {})
        wanted = int(owner["spec"].get("replicas", 1))
        if int(status.get("replicas") or 0) >= wanted and not _replica_failure(owner):
            continue
        message = _replica_failure(owner) or _newest_refusal(_name(owner), events)
        if message:
            refused[_name(owner)] = message
    if not refused:
        return ok(f"all {len(owners)} have as many pods as they should")
    sentences = "; ".join(f"{name}: {text[:300]}" for name, text in sorted(refused.items()))
    texts = " ".join(refused.values())
    advice = dict.fromkeys(words for part, words in REFUSED.items() if part in texts)
    return fail(
        f"the API server refuses pods of {len(refused)} of {len(owners)}: {sentences}",
        "; ".join(advice) or "see 'kubectl get events --field-selector reason=FailedCreate'",
    )


def _replica_failure(owner: Json) -> str:
    for condition in owner.get("status", {}).get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message", ""))
    return ""


def _newest_refusal(name: str, events: Iterable[Json]) -> str:
    newest = ""
    for event in sorted(events, key=_time):
        about = event.get("involvedObject") or {}
        below = str(about.get("name", ""))
        if event.get("reason") == "FailedCreate" and (
            below == name or below.startswith(f"{name}-")
        ):
            newest = str(event.get("message", ""))
    return newest


def _time(event: Json) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def pods(found: Sequence[Json], events: Iterable[Json], owners: int = 0) -> Finding:
    """Explains why pods of a release are not ready. found: the pods. owners: how many Deployments
    and the like there are to make them."""
    if not found and owners:
        return fail(f"none is there, of {owners} pools", "see the check 'pools'")
    if not found:
        return ok("none is installed here")
    warnings = _newest_warnings(events)
    waiting = [pod for pod in found if not _ready(pod) and not _leaves(pod)]
    if not waiting:
        restarts = {_name(pod): _restarts(pod) for pod in found if _restarts(pod)}
        if restarts:
            counts = ", ".join(f"{name} {count} times" for name, count in sorted(restarts.items()))
            return warn(f"all {len(found)} are ready; restarted: {counts}", _last_word(found))
        return ok(f"all {len(found)} are ready")
    whys = {_name(pod): why(pod, warnings.get(_name(pod))) for pod in waiting}
    sentences = [
        f"{pod}: {', '.join(text for _, text in reasons)}" for pod, reasons in whys.items()
    ]
    more = f" and {len(whys) - MOST_TOLD} more" if len(whys) > MOST_TOLD else ""
    kinds = dict.fromkeys(kind for reasons in whys.values() for kind, _ in reasons)
    advice = [ADVICE[kind] for kind in kinds if kind in ADVICE]
    return fail(
        f"{len(waiting)} of {len(found)} are not ready: {'; '.join(sentences[:MOST_TOLD])}{more}",
        "; ".join(dict.fromkeys(advice)) or "see 'kubectl describe pod' and 'kubectl logs'",
    )


def why(pod: Json, warning: Json | None = None) -> list[tuple[str, str]]:
    """Returns kinds and sentences of what keeps a pod from being ready, most specific first."""
    found: list[tuple[str, str]] = []
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            found.append((str(condition.get("reason")), str(condition.get("message", ""))))
    for container in _containers(status):
        found += _of_container(container)
    if warning is not None and (warning.get("reason") == "Unhealthy" or not found):
        found.append((str(warning.get("reason")), str(warning.get("message", ""))[:300]))
    return found or [("", f"phase {status.get('phase', 'unknown')}, not ready yet")]


def _of_container(container: Json) -> list[tuple[str, str]]:
    found = []
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = str(waiting.get("reason", ""))
    if reason and reason not in ("PodInitializing", "ContainerCreating"):
        message = str(waiting.get("message", ""))[:300]
        found.append((reason, f"{reason} {message}".rstrip()))
    for state in (container.get("state"), container.get("lastState")):
        ended = (state or {}).get("terminated") or {}
        if ended and ended.get("exitCode", 0) != 0:
            code, kind = int(ended["exitCode"]), str(ended.get("reason", ""))
            means = "" if kind == "OOMKilled" else EXIT_CODES.get(code, "")
            text = f"{container.get('name')} ended with code {code} ({kind or 'no reason'})"
            found.append((kind, f"{text}: {means}" if means else text))
    return found


def _newest_warnings(events: Iterable[Json]) -> Mapping[str, Json]:
    """Returns the newest warning of each pod."""
    found: dict[str, Json] = {}
    for event in sorted(events, key=_time):
        about = event.get("involvedObject") or {}
        if event.get("type") == "Warning" and about.get("kind") == "Pod":
            found[str(about.get("name"))] = event
    return found


def _containers(status: Json) -> list[Json]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _ready(pod: Json) -> bool:
    status = pod.get("status", {})
    if status.get("phase") == "Succeeded":
        return True
    conditions = status.get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _leaves(pod: Json) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _restarts(pod: Json) -> int:
    return sum(int(c.get("restartCount", 0)) for c in _containers(pod.get("status", {})))


def _last_word(found: Iterable[Json]) -> str:
    """Returns why the first restarted container ended."""
    for pod in found:
        for container in _containers(pod.get("status", {})):
            for kind, text in _of_container(container):
                return f"{_name(pod)}: {text}; {ADVICE.get(kind, 'see kubectl logs --previous')}"
    return "see 'kubectl logs --previous'"


HEALTH_PORT = 50052
PROBE_S = 3.0

Reached = bool | None
"""Whether a connection was accepted; None: it was not tried."""


def policy(
    engines: Sequence[Json],
    policies: Sequence[Json],
    reached: Mapping[str, Reached],
    control: Reached,
) -> Finding:
    """Judges whether the network enforces the policies by which the engines' KV is isolated.

    engines: pods. reached: by pod, whether this pod reached its health port, which no policy of the
    chart opens. control: whether it reached a pod that may be reached, without which silence shows
    nothing.
    """
    declared = sorted({_kv_network(pod) for pod in engines} - {""})
    if not engines:
        return ok("no prefill or decode pod is there to be tried")
    covered = [pod for pod in engines if any(_selects(one, pod) for one in policies)]
    words = f"kv.network is {', '.join(declared) or 'unknown'}"
    if not covered:
        if "isolated" not in declared:
            return ok(f"{words}, and no policy is to keep others out")
        return warn(
            f"{words}, and no NetworkPolicy selects the engines: nothing here shows that it is",
            "see that the network of KV is one that only Baton's engines reach, or set "
            "networkPolicy.enabled",
        )
    open_ = sorted(_name(pod) for pod in covered if reached.get(_name(pod)))
    if open_:
        return fail(
            f"{words} by NetworkPolicies, and this pod, which they let in nowhere, reached "
            f"{', '.join(open_)} at port {HEALTH_PORT}: the network does not enforce them",
            "install a network plugin that does (Calico, Cilium and others); or set "
            "tls.internal.enabled, and kv.network=trusted if everybody on the pod network may read "
            "the workers' memory",
        )
    tried = [pod for pod in covered if reached.get(_name(pod)) is False]
    if not tried or not control:
        return warn(
            f"{words} by NetworkPolicies; whether the network enforces them was not tried",
            "run the doctor as a Job in the cluster (deploy/k8s/doctor), while a router serves",
        )
    return ok(f"{words}: of {len(tried)} engines none could be reached from this pod")


def _selects(one: Json, pod: Json) -> bool:
    """Whether a policy restricts what comes into a pod."""
    spec = one.get("spec", {})
    selector = spec.get("podSelector") or {}
    wanted = selector.get("matchLabels") or {}
    labels = pod["metadata"].get("labels") or {}
    # The chart's own selectors have no other operator.
    listed = all(
        one.get("operator") == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions") or ()
    )
    types = spec.get("policyTypes") or ["Ingress"]
    return wanted.items() <= labels.items() and listed and "Ingress" in types


def _kv_network(pod: Json) -> str:
    for container in pod["spec"]["containers"]:
        for entry in container.get("env") or ():
            if entry.get("name") == "BATON_KV_NETWORK":
                return str(entry.get("value", ""))
    return ""


def _accepts(pod: Json, port: int) -> bool:
    """Whether a pod accepts a connection from here."""
    try:
        socket.create_connection((pod["status"]["podIP"], port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


OLDEST_MINOR = 30
"""The chart's minimum (kubeVersion)."""

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-"
EXTENSIONS = {
    "keda.sh": "KEDA (keda.enabled)",
    "monitoring.coreos.com": "Prometheus operator (serviceMonitor, podMonitor)",
    "gateway.networking.k8s.io": "Gateway API (routes)",
    "cert-manager.io": "cert-manager (TLS)",
}
"""API groups that the chart can use, and what for."""

ENFORCE = "pod-security.kubernetes.io/enforce"


def judge_version(answer: ApiAnswer) -> Finding:
    if answer.status != 200:
        return fail(
            f"the API answers {answer.status}", "see whether the kubeconfig or the token is current"
        )
    version = str(answer.body.get("gitVersion", "of no version"))
    minor = re.match(r"\d+", str(answer.body.get("minor", "")))
    if answer.body.get("major") == "1" and minor and int(minor[0]) < OLDEST_MINOR:
        return fail(f"Kubernetes {version}", f"upgrade to 1.{OLDEST_MINOR} or newer")
    return ok(f"Kubernetes {version}")


def judge_namespace(name: str, answer: ApiAnswer, needs: Needs) -> Finding:
    if answer.status == 404:
        return warn(
            f"there is no namespace {name}",
            f"helm install --create-namespace, or kubectl create namespace {name}",
        )
    if answer.status != 200:
        return warn(
            f"{name}: not allowed to see it ({answer.status}), so its pod security is not known",
            "give the doctor 'get' on namespaces",
        )
    labels = answer.body.get("metadata", {}).get("labels") or {}
    level = labels.get(ENFORCE, "privileged")
    if level not in LEVELS:
        return warn(f"{name} enforces pod security {level!r}", f"use one of {', '.join(LEVELS)}")
    text = f"{name} enforces pod security {level!r}" if ENFORCE in labels else name
    if LEVELS.index(level) > LEVELS.index(needs.pod_security):
        return fail(
            f"{text}: pods that lock memory for RDMA are not admitted",
            f"kubectl label namespace {name} {ENFORCE}={needs.pod_security} --overwrite, "
            "and keep other workloads out of it",
        )
    return ok(text)


def judge_access(account: str, reviews: Sequence[tuple[str, bool | None]]) -> Finding:
    """reviews: whether the account has each verb on EndpointSlices; None: unknown."""
    missing = [verb for verb, allowed in reviews if allowed is False]
    if missing:
        return fail(
            f"{account} may not {', '.join(missing)} endpointslices: the router finds no worker",
            "bind it to a Role with get, list and watch on endpointslices (discovery.k8s.io); the "
            "chart does",
        )
    if any(allowed is None for _, allowed in reviews):
        return warn(
            f"whether {account} may watch endpointslices is not known",
            "give the doctor 'create' on localsubjectaccessreviews (authorization.k8s.io)",
        )
    return ok(f"{account} may get, list and watch endpointslices")


def judge_gpus(nodes: ApiAnswer, needs: Needs) -> Finding:
    if nodes.status != 200:
        return _unseen("nodes", nodes.status, needed=needs.gpu)
    found = _counted(nodes.items, lambda name: name == GPU or name.startswith(MIG))
    if found:
        kinds = sorted({name for resources in found.values() for name in resources} - {GPU})
        total = sum(sum(resources.values()) for resources in found.values())
        slices = f", among them slices: {', '.join(kinds)}" if kinds else ""
        return ok(f"{total} GPUs on {len(found)} nodes{slices}")
    if needs.gpu:
        return fail(
            f"no node offers {GPU}",
            "install the NVIDIA device plugin (or GPU operator) on nodes with GPUs; "
            "'kubectl describe node' shows what a node offers; with dynamic resource allocation "
            "'kubectl get resourceslices' does",
        )
    return ok("none, and none is needed")


def judge_rdma(nodes: ApiAnswer, needs: Needs) -> Finding:
    if nodes.status != 200:
        return _unseen("nodes", nodes.status, needed=needs.rdma)
    found = _counted(nodes.items, lambda name: name.startswith("rdma/"))
    if found:
        names = sorted({name for resources in found.values() for name in resources})
        return ok(f"{', '.join(names)} on {len(found)} nodes")
    if needs.rdma:
        return fail(
            "no node offers an rdma/* resource",
            "install an RDMA device plugin (k8s-rdma-shared-dev-plugin or the network operator), "
            "or use the preset gpu-tcp",
        )
    return ok("none, and none is needed")


def judge_metrics_api(answer: ApiAnswer) -> Finding:
    if answer.status == 200:
        return ok("serves; an HPA on CPU works")
    if answer.status == 403:
        return ok("not allowed to ask it; that is no matter to Baton's pods")
    return warn(
        f"answers {answer.status}: an HPA on CPU never scales",
        "install metrics-server, or leave autoscaling off",
    )


def judge_extensions(groups: Collection[str]) -> Finding:
    there = [words for group, words in EXTENSIONS.items() if group in groups]
    missing = [words for group, words in EXTENSIONS.items() if group not in groups]
    text = f"there: {', '.join(there) or 'none'}"
    if missing:
        text += f"; not there, so leave off: {', '.join(missing)}"
    return ok(text)


def judge_images(wanted: Sequence[str], nodes: ApiAnswer) -> Finding:
    """Only nodes that have pulled an image list it; whether others can pull it is seen only when a
    pod starts."""
    if nodes.status != 200:
        return _unseen("nodes", nodes.status, needed=False)
    missing = []
    for image in wanted:
        having = [node for node in nodes.items if image in _image_names(node)]
        if len(having) < len(nodes.items):
            missing.append(f"{image} on {len(having)} of {len(nodes.items)} nodes")
    if missing:
        return warn(
            f"not everywhere yet: {'; '.join(missing)}",
            "they are pulled when a pod needs them: see that the registry is reachable from the "
            "nodes and that imagePullSecrets are set, or load the images into the nodes",
        )
    return ok(f"{', '.join(wanted)} on every node")


def _counted(nodes: Iterable[Json], wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
    """Returns the allocatable amount of each resource on each node that has any."""
    found = {}
    for node in nodes:
        offers = node.get("status", {}).get("allocatable") or {}
        numbers = {
            name: int(number)
            for name, number in offers.items()
            if wanted(name) and str(number).isdecimal() and int(number)
        }
        if numbers:
            found[str(node["metadata"]["name"])] = numbers
    return found


def _image_names(node: Json) -> set[str]:
    listed = node.get("status", {}).get("images") or ()
    return {name for image in listed for name in image.get("names") or ()}


def _unseen(what: str, status: int, *, needed: bool) -> Finding:
    text = f"not allowed to list {what} ({status})"
    advice = f"give the doctor 'list' on {what}, or ask as somebody who may"
    return warn(text, advice) if needed else ok(f"{text}; none is needed")


ASK_S = 3.0

Descriptions = Mapping[str, WorkerDescription | None]
"""By pod; None: it did not answer."""


class Where(NamedTuple):
    pod: str
    role: str
    address: str


async def ask(
    where: Iterable[Where], certificates: Certificates | None = None, token: str = ""
) -> Descriptions:
    """Asks all workers for their descriptions at once; takes a few seconds at most."""
    places = list(where)
    channels = Channels(certificates, token=token)
    try:
        found = await asyncio.gather(*(_ask(channels, place) for place in places))
    finally:
        await channels.close()
    return {place.pod: described for place, described in zip(places, found, strict=True)}


def workers(described: Descriptions) -> Finding:
    """Differences are no fault during an upgrade: incompatible workers are not paired."""
    if not described:
        return ok("none is there to be asked")
    known = {pod: one for pod, one in described.items() if one is not None}
    silent = sorted(described.keys() - known.keys())
    if not known:
        return warn(
            f"none of {len(described)} can be asked from here",
            "run the doctor as a Job in the cluster; with TLS give it --tls-cert, --tls-key and "
            "--tls-ca",
        )
    differences = [*_models(known), *_pairs(known)]
    if differences:
        return warn(
            "; ".join(differences),
            "they are not paired, and decode prefills by itself: wait for the upgrade to end, or "
            "give all the same image, model and kv_wire_dtype (docs/upgrading.md)",
        )
    if silent:
        return warn(f"the same, but not asked: {', '.join(silent)}", "see whether they are ready")
    return ok(f"all {len(known)} have the same model, tokenizer and wire versions")


async def _ask(channels: Channels, place: Where) -> WorkerDescription | None:
    watch: Any = WorkerStub(channels.get(place.address, place.role)).Watch(
        worker_pb2.WatchRequest()
    )
    try:
        async with asyncio.timeout(ASK_S):
            first = await watch.read()
        return description_from_proto(first.description)
    except (TimeoutError, BatonError, grpc.RpcError, AttributeError):
        return None
    finally:
        watch.cancel()


def _models(known: Mapping[str, WorkerDescription]) -> list[str]:
    """Returns which workers of models of one name have others. Tokenizers have no model digest."""
    found = []
    for name in ("digest", "tokenizer_digest"):
        models: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for pod, one in sorted(known.items()):
            if one.model is not None and getattr(one.model, name):
                models[one.model.name][getattr(one.model, name)].append(pod)
        what = "model" if name == "digest" else "tokenizer"
        for groups in models.values():
            if len(groups) > 1:
                parts = [f"{digest[:12]} on {', '.join(pods)}" for digest, pods in groups.items()]
                found.append(f"{what} {' against '.join(parts)}")
    return found


def _pairs(known: Mapping[str, WorkerDescription]) -> Sequence[str]:
    """Returns how KV layouts differ except in the model, each difference once."""
    found: dict[str, str] = {}
    having = [(pod, one) for pod, one in sorted(known.items()) if one.layout is not None]
    for (pod, one), (other_pod, other) in combinations(having, 2):
        if one.model and other.model and one.model.name != other.model.name:
            continue
        text = difference(one.layout, one.transports, other.layout, other.transports)
        text = "; ".join(p for p in text.split("; ") if p and not p.startswith("model_digest"))
        if text:
            found.setdefault(text, f"{pod} and {other_pod}: {text}")
    return list(found.values())


COMPONENTS = ("router", "tokenizer", "prefill", "decode", "detokenizer")
VERBS = ("get", "list", "watch")
REVIEWS = "/apis/authorization.k8s.io/v1/namespaces/{}/localsubjectaccessreviews"
SELF_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cluster", help="say what a Kubernetes cluster, and a Baton in it, lack"
    )
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default="cpu",
        help="what the cluster is to run, as the chart's values files (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--namespace", "-n", default="", help="where Baton is, or will be")
    parser.add_argument("--release", default="", help="of Helm (default: any Baton there)")
    parser.add_argument(
        "--service-account", default="", metavar="NAME",
        help="the router's (default: as its pods have it)",
    )  # fmt: skip
    parser.add_argument(
        "--image", action="append", default=[], metavar="NAME",
        help="an image that the nodes will need; may be given more than once",
    )  # fmt: skip
    parser.add_argument("--kubeconfig", default="", metavar="FILE", help="(default: as kubectl)")
    for name in ("tls-cert", "tls-key", "tls-ca"):
        parser.add_argument(
            f"--{name}", default=os.environ.get(f"BATON_{name.upper().replace('-', '_')}", ""),
            metavar="FILE", help="to ask workers that use TLS; the certificate is a doctor's",
        )  # fmt: skip
    # The parent parser also has --json; a default here would override it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if something required is missing, else 0. Raises InvalidArgument."""
    # Without the API the other checks have no data.
    return checks.report(_checks(args), as_json=args.json, needed="api")


def _checks(args: argparse.Namespace) -> Iterator[Check]:
    try:
        api = Api.open(args.kubeconfig)
    except Unavailable as error:
        missing = fail(error.message, install("k8s"))
        yield "api", lambda: missing
        return
    yield "api", lambda: _reached(api)
    yield from _of_api(api, args)


def _of_api(api: Api, args: argparse.Namespace) -> Iterator[Check]:
    needs = PRESETS[args.preset]
    namespace = args.namespace or api.namespace
    if not namespace.replace("-", "").isalnum():
        raise InvalidArgument("must be a namespace's name", field="namespace")
    core = f"/api/v1/namespaces/{namespace}"
    seen = _ours(api.get(f"{core}/pods", labelSelector=_selector(args.release)))
    nodes = api.get("/api/v1/nodes")
    yield (
        "namespace",
        lambda: judge_namespace(namespace, api.get(core), needs),
    )
    yield "router access", lambda: _access(api, namespace, args.service_account, seen.items)
    yield "gpus", lambda: judge_gpus(nodes, needs)
    yield "rdma", lambda: judge_rdma(nodes, needs)
    yield (
        "metrics api",
        lambda: judge_metrics_api(api.get("/apis/metrics.k8s.io/v1beta1/nodes")),
    )
    yield (
        "extensions",
        lambda: judge_extensions([str(g["name"]) for g in api.get("/apis").body["groups"]]),
    )
    if args.image:
        yield "images", lambda: judge_images(args.image, nodes)
    if api.in_pod:
        services = _ours(api.get(f"{core}/services", labelSelector=_selector(args.release))).items
        yield from _of_pod(needs, [f"{one['metadata']['name']}.{namespace}" for one in services])
    events = api.get(f"{core}/events", fieldSelector="type=Warning")
    owners = _owners(api, namespace, args.release)
    yield "pools", lambda: _pools(owners, events)
    yield "pods", lambda: _pods(seen, events, sum(len(each.items) for each in owners))
    yield "network policy", lambda: _policy(api, namespace, seen.items)
    yield "workers", lambda: _workers(args, seen.items)


def _of_pod(needs: Needs, services: list[str]) -> Iterator[Check]:
    yield "dns", lambda: local_dns(services)
    yield "locked memory", lambda: local_memory_lock(needs)
    yield "open files", checks.open_files
    yield "shared memory", checks.shared_memory
    yield "rdma devices", lambda: local_infiniband(needs)
    yield "gpu driver", lambda: local_gpu_driver(needs)


def _reached(api: Api) -> Finding:
    try:
        return judge_version(api.get("/version"))
    except Unavailable as error:
        return fail(error.message, "see whether the kubeconfig names the right cluster")


def _access(api: Api, namespace: str, account: str, found: list[Json]) -> Finding:
    """Reviews the router's service account if its name is known, else, in a pod, the caller's."""
    routers = [pod for pod in found if _component(pod) == "router"]
    account = account or next((str(pod["spec"]["serviceAccountName"]) for pod in routers), "")
    if not account and not api.in_pod:
        return ok("no router is installed here; --service-account NAME checks one by name")
    reviews: list[tuple[str, bool | None]] = []
    for verb in VERBS:
        wanted = {
            "namespace": namespace,
            "group": "discovery.k8s.io",
            "resource": "endpointslices",
            "verb": verb,
        }
        spec: Json = {"resourceAttributes": wanted}
        path = SELF_REVIEWS
        if account:
            spec["user"] = f"system:serviceaccount:{namespace}:{account}"
            # The account also has the rights of these groups.
            spec["groups"] = [
                "system:authenticated",
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
            ]
            path = REVIEWS.format(namespace)
        answer = api.post(path, {"spec": spec})
        known = answer.status in (200, 201)
        reviews.append((verb, bool(answer.body["status"].get("allowed")) if known else None))
    return judge_access(account or "this pod's service account", reviews)


def _owners(api: Api, namespace: str, release: str) -> list[ApiAnswer]:
    """What makes pods of Baton. A kind that the cluster does not know has none."""
    groups = ("apps/v1", "deployments"), ("leaderworkerset.x-k8s.io/v1", "leaderworkersets")
    return [
        _ours(
            api.get(
                f"/apis/{group}/namespaces/{namespace}/{kind}", labelSelector=_selector(release)
            )
        )
        for group, kind in groups
    ]


def _pools(owners: Sequence[ApiAnswer], events: ApiAnswer) -> Finding:
    refused = [answer.status for answer in owners if answer.status in (401, 403)]
    if refused:
        return warn(
            f"not allowed to list Deployments ({refused[0]}), refused pods are not seen",
            "give the doctor 'list' on deployments (apps) and leaderworkersets "
            "(leaderworkerset.x-k8s.io)",
        )
    return pools([one for answer in owners for one in answer.items], events.items)


def _policy(api: Api, namespace: str, found: Sequence[Json]) -> Finding:
    answer = api.get(f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies")
    if answer.status != 200:
        return warn(
            f"not allowed to list NetworkPolicies ({answer.status})",
            "give the doctor 'list' on networkpolicies (networking.k8s.io)",
        )
    here = [pod for pod in found if pod["status"].get("podIP") and _ready(pod) and not _leaves(pod)]
    engines = [pod for pod in here if _component(pod) in ("prefill", "decode")]
    reached: dict[str, Reached] = {}
    control: Reached = None
    if api.in_pod:
        # An engine's own port of KV and gRPC may be open to this pod by a rule of its user's.
        reached = {_name(pod): _accepts(pod, HEALTH_PORT) for pod in engines}
        routers = [pod for pod in here if _component(pod) == "router"]
        control = any(_accepts(pod, port) for pod in routers for port in _ports(pod))
    return policy(engines, answer.items, reached, control)


def _pods(seen: ApiAnswer, events: ApiAnswer, owners: int) -> Finding:
    if seen.status != 200:
        return ok(f"not allowed to list pods ({seen.status}); give the doctor 'list' on pods")
    return pods(seen.items, events.items, owners)


def _workers(args: argparse.Namespace, found: list[Json]) -> Finding:
    from batonlm.cli.access import peer_token
    from batonlm.rpc.address import join
    from batonlm.rpc.options import TlsOptions

    tls = TlsOptions(tls_cert=args.tls_cert, tls_key=args.tls_key, tls_ca=args.tls_ca)
    where = [
        Where(str(pod["metadata"]["name"]), _component(pod), join(pod["status"]["podIP"], port))
        for pod in found
        if _component(pod) in COMPONENTS[1:]
        and pod["status"].get("podIP")
        and not pod["metadata"].get("deletionTimestamp")
        for port in _ports(pod)
    ]
    token = peer_token(each.address for each in where)
    return workers(asyncio.run(ask(where, tls.certificates(), token)))


def _ports(pod: Json) -> Iterator[int]:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == "grpc":
                yield int(port["containerPort"])


def _component(each: Json) -> str:
    """Returns the role of an object of the chart, whose component may begin with a model's key."""
    labels = each["metadata"].get("labels") or {}
    return str(labels.get("app.kubernetes.io/component", "")).rpartition("-")[2]


def _selector(release: str) -> str:
    return f"app.kubernetes.io/instance={release}" if release else "app.kubernetes.io/name=baton"


def _ours(answer: ApiAnswer) -> ApiAnswer:
    """Leaves out what belongs to no component."""
    items = [each for each in answer.items if _component(each) in COMPONENTS]
    return ApiAnswer(answer.status, {**answer.body, "items": items})
