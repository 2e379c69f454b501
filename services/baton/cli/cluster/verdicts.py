"""What answers of a cluster's API mean for Baton, as findings; asks nobody.

All take parts of the API's own JSON, so that they can be tried on any cluster's answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.cli.cluster.api import Answer, Json
from baton.cli.cluster.needs import LEVELS, Needs
from baton.cli.findings import Finding, fail, ok, warn

OLDEST_MINOR = 30
"""As the chart asks for (kubeVersion)."""

GPU = "nvidia.com/gpu"
EXTENSIONS = {
    "keda.sh": "KEDA (keda.enabled)",
    "monitoring.coreos.com": "Prometheus operator (serviceMonitor, podMonitor)",
    "gateway.networking.k8s.io": "Gateway API (routes)",
    "cert-manager.io": "cert-manager (TLS)",
}
"""API groups of what the chart can use, and what it uses them for."""

ENFORCE = "pod-security.kubernetes.io/enforce"


def version(answer: Answer) -> Finding:
    if answer.status != 200:
        return fail(
            f"the API answers {answer.status}", "see whether the kubeconfig or the token is current"
        )
    told = str(answer.body.get("gitVersion", "of no version"))
    minor = re.match(r"\d+", str(answer.body.get("minor", "")))
    if answer.body.get("major") == "1" and minor and int(minor[0]) < OLDEST_MINOR:
        return fail(f"Kubernetes {told}", f"upgrade to 1.{OLDEST_MINOR} or newer")
    return ok(f"Kubernetes {told}")


def namespace(name: str, answer: Answer, needs: Needs) -> Finding:
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
    said = f"{name} enforces pod security {level!r}" if ENFORCE in labels else name
    if LEVELS.index(level) > LEVELS.index(needs.pod_security):
        return fail(
            f"{said}: pods that lock memory for RDMA are not admitted",
            f"kubectl label namespace {name} {ENFORCE}={needs.pod_security} --overwrite, "
            "and keep other workloads out of it",
        )
    return ok(said)


def access(account: str, reviews: Sequence[tuple[str, bool | None]]) -> Finding:
    """reviews: of each verb on EndpointSlices, whether the account has it; None: not known."""
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


def gpus(nodes: Answer, needs: Needs) -> Finding:
    if nodes.status != 200:
        return _unseen("nodes", nodes.status, needed=needs.gpu)
    found = _counted(nodes.items, lambda name: name == GPU)
    if found:
        total = sum(sum(resources.values()) for resources in found.values())
        return ok(f"{total} GPUs on {len(found)} nodes")
    if needs.gpu:
        return fail(
            f"no node offers {GPU}",
            "install the NVIDIA device plugin (or GPU operator) on nodes with GPUs; "
            "'kubectl describe node' shows what a node offers",
        )
    return ok("none, and none is needed")


def rdma(nodes: Answer, needs: Needs) -> Finding:
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


def metrics_api(answer: Answer) -> Finding:
    if answer.status == 200:
        return ok("serves; an HPA on CPU works")
    if answer.status == 403:
        return ok("not allowed to ask it; that is no matter to Baton's pods")
    return warn(
        f"answers {answer.status}: an HPA on CPU never scales",
        "install metrics-server, or leave autoscaling off",
    )


def extensions(groups: Collection[str]) -> Finding:
    there = [words for group, words in EXTENSIONS.items() if group in groups]
    missing = [words for group, words in EXTENSIONS.items() if group not in groups]
    said = f"there: {', '.join(there) or 'none'}"
    if missing:
        said += f"; not there, so leave off: {', '.join(missing)}"
    return ok(said)


def images(wanted: Sequence[str], nodes: Answer) -> Finding:
    """Only nodes that have one tell of it; whether another can pull it, only a pod shows."""
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
    """Of each node that has any: how many of each resource can be given out."""
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
    said = f"not allowed to list {what} ({status})"
    advice = f"give the doctor 'list' on {what}, or ask as somebody who may"
    return warn(said, advice) if needed else ok(f"{said}; none is needed")
