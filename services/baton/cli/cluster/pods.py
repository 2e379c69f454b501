"""Why pods of an installed Baton are not ready, in words and with what to do; asks nobody."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton.cli.cluster.api import Json
from baton.cli.findings import Finding, fail, ok, warn

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
"""Of Baton's processes, and of who is killed."""


def pods(found: Sequence[Json], events: Iterable[Json]) -> Finding:
    """found: the pods of a release."""
    if not found:
        return ok("none is installed here")
    warnings = _newest_warnings(events)
    waiting = [pod for pod in found if not _ready(pod) and not _leaves(pod)]
    if not waiting:
        restarts = {_name(pod): _restarts(pod) for pod in found if _restarts(pod)}
        if restarts:
            told = ", ".join(f"{name} {count} times" for name, count in sorted(restarts.items()))
            return warn(f"all {len(found)} are ready; restarted: {told}", _last_word(found))
        return ok(f"all {len(found)} are ready")
    whys = {_name(pod): why(pod, warnings.get(_name(pod))) for pod in waiting}
    sentences = [
        f"{pod}: {', '.join(said for _, said in reasons)}" for pod, reasons in whys.items()
    ]
    more = f" and {len(whys) - MOST_TOLD} more" if len(whys) > MOST_TOLD else ""
    kinds = dict.fromkeys(kind for reasons in whys.values() for kind, _ in reasons)
    advice = [ADVICE[kind] for kind in kinds if kind in ADVICE]
    return fail(
        f"{len(waiting)} of {len(found)} are not ready: {'; '.join(sentences[:MOST_TOLD])}{more}",
        "; ".join(dict.fromkeys(advice)) or "see 'kubectl describe pod' and 'kubectl logs'",
    )


def why(pod: Json, warning: Json | None = None) -> list[tuple[str, str]]:
    """What keeps a pod from being ready, most telling first: kinds, and sentences."""
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
            said = f"{container.get('name')} ended with code {code} ({kind or 'no reason'})"
            found.append((kind, f"{said}: {means}" if means else said))
    return found


def _newest_warnings(events: Iterable[Json]) -> Mapping[str, Json]:
    """By pod."""
    found: dict[str, Json] = {}
    for event in sorted(events, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime"))):
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
    """Why the first of those that restarted did."""
    for pod in found:
        for container in _containers(pod.get("status", {})):
            for kind, said in _of_container(container):
                return f"{_name(pod)}: {said}; {ADVICE.get(kind, 'see kubectl logs --previous')}"
    return "see 'kubectl logs --previous'"
