"""`baton doctor cluster`: asks the API, this pod and the workers, and shows findings."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator

from rich.console import Console

from baton.cli.cluster import here, verdicts
from baton.cli.cluster.api import Answer, Api, Json
from baton.cli.cluster.needs import PRESETS, Needs
from baton.cli.cluster.pods import pods
from baton.cli.findings import Finding, document, fail, failed, ok, show
from baton.core.errors import BatonError, InvalidArgument, Unavailable

log = logging.getLogger(__name__)

COMPONENTS = ("router", "tokenizer", "prefill", "decode", "detokenizer")
VERBS = ("get", "list", "watch")
REVIEWS = "/apis/authorization.k8s.io/v1/namespaces/{}/localsubjectaccessreviews"
SELF_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

Named = tuple[str, Callable[[], Finding]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    # The parent command has --json, too; a default here would undo it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """1 when a needed thing is missing, else 0. Raises InvalidArgument."""
    console = Console(highlight=False, soft_wrap=True)
    found: dict[str, Finding] = {}
    for name, check in _checks(args):
        found[name] = _checked(name, check)
        if not args.json:
            show(console, name, found[name])
        if name == "api" and failed(found):
            # Of the rest nothing can be known.
            break
    if args.json:
        print(json.dumps(document(found), indent=2))
    return int(failed(found))


def _checks(args: argparse.Namespace) -> Iterator[Named]:
    try:
        api = Api.open(args.kubeconfig)
    except Unavailable as error:
        missing = fail(error.message, "pip install 'baton[k8s]'")
        yield "api", lambda: missing
        return
    try:
        yield "api", lambda: _reached(api)
        yield from _of_api(api, args)
    finally:
        api.close()


def _of_api(api: Api, args: argparse.Namespace) -> Iterator[Named]:
    needs = PRESETS[args.preset]
    namespace = args.namespace or api.namespace
    if not namespace.replace("-", "").isalnum():
        raise InvalidArgument("must be a namespace's name", field="namespace")
    core = f"/api/v1/namespaces/{namespace}"
    seen = api.get(f"{core}/pods", labelSelector=_selector(args.release))
    nodes = api.get("/api/v1/nodes")
    yield (
        "namespace",
        lambda: verdicts.namespace(namespace, api.get(core), needs),
    )
    yield "router access", lambda: _access(api, namespace, args.service_account, seen.items)
    yield "gpus", lambda: verdicts.gpus(nodes, needs)
    yield "rdma", lambda: verdicts.rdma(nodes, needs)
    yield (
        "metrics api",
        lambda: verdicts.metrics_api(api.get("/apis/metrics.k8s.io/v1beta1/nodes")),
    )
    yield (
        "extensions",
        lambda: verdicts.extensions([str(g["name"]) for g in api.get("/apis").body["groups"]]),
    )
    if args.image:
        yield "images", lambda: verdicts.images(args.image, nodes)
    if api.in_pod:
        services = api.get(f"{core}/services", labelSelector=_selector(args.release)).items
        yield from _of_pod(needs, [f"{one['metadata']['name']}.{namespace}" for one in services])
    yield "pods", lambda: _pods(seen, api.get(f"{core}/events", fieldSelector="type=Warning"))
    yield "workers", lambda: _workers(args, seen.items)


def _of_pod(needs: Needs, services: list[str]) -> Iterator[Named]:
    yield "dns", lambda: here.dns(services)
    yield "locked memory", lambda: here.memory_lock(needs)
    yield "open files", here.open_files
    yield "shared memory", here.shared_memory
    yield "rdma devices", lambda: here.infiniband(needs)
    yield "gpu driver", lambda: here.gpu_driver(needs)


def _reached(api: Api) -> Finding:
    try:
        return verdicts.version(api.get("/version"))
    except Unavailable as error:
        return fail(error.message, "see whether the kubeconfig names the right cluster")


def _access(api: Api, namespace: str, account: str, found: list[Json]) -> Finding:
    """Of the router's service account, if there is a name; else of whoever asks, in a pod."""
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
            # What everybody may do, and every service account, it may, too.
            spec["groups"] = [
                "system:authenticated",
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
            ]
            path = REVIEWS.format(namespace)
        answer = api.post(path, {"spec": spec})
        known = answer.status in (200, 201)
        reviews.append((verb, bool(answer.body["status"].get("allowed")) if known else None))
    return verdicts.access(account or "this pod's service account", reviews)


def _pods(seen: Answer, events: Answer) -> Finding:
    if seen.status != 200:
        return ok(f"not allowed to list pods ({seen.status}); give the doctor 'list' on pods")
    return pods(seen.items, events.items)


def _workers(args: argparse.Namespace, found: list[Json]) -> Finding:
    from baton.cli.access import peer_token
    from baton.cli.cluster.workers import Where, ask, workers
    from baton.rpc.address import join
    from baton.rpc.tls_options import TlsOptions

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


def _component(pod: Json) -> str:
    return str((pod["metadata"].get("labels") or {}).get("app.kubernetes.io/component", ""))


def _selector(release: str) -> str:
    one = f"app.kubernetes.io/instance={release}" if release else "app.kubernetes.io/name=baton"
    return f"{one},app.kubernetes.io/component in ({','.join(COMPONENTS)})"


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that breaks is a finding of its own, and the others still run."""
    try:
        return check()
    except InvalidArgument:
        raise
    except BatonError as error:
        return fail(error.message, "see whether the API can be reached")
    except Exception as error:
        log.debug("check %s broke", name, exc_info=True)
        return fail(f"the check itself broke: {type(error).__name__}", "please report this")
