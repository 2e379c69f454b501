"""A model on a volume: a folder of the node, and a claim of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.k8s.chart_cluster import namespace, told
from tests.k8s.cluster import Cluster
from tests.k8s.conftest import CPU_IMAGE

FOLDER = "tiny"
"""Where the bundled model is on the volume."""
_DONE_S = 120


@contextmanager
def claimed(cluster: Cluster, name: str) -> Iterator[str]:
    """Makes a claim of this name, of a volume with the bundled model. Both end with the block."""
    volume_name = f"{cluster.namespace}-{name}"
    folder = f"/var/tmp/{volume_name}"
    size = {"storage": "1Gi"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {"capacity": size, "hostPath": {"path": folder}, **shared},
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"resources": {"requests": size}, "volumeName": volume_name, **shared},
    }
    with namespace() as elsewhere:
        fill = f"cp -rL /opt/baton/models/baton-tiny /folder/{FOLDER}"
        _on_the_node(elsewhere, folder, "fill", fill)
        cluster.kubectl("create", "-f", "-", text=json.dumps(volume))
        try:
            cluster.kubectl("create", "-f", "-", text=json.dumps(wanted))
            yield name
            cluster.kubectl("delete", "pvc", name)
        finally:
            cluster.kubectl("delete", "pv", volume_name)
            _on_the_node(elsewhere, folder, "clear", f"rm -r /folder/{FOLDER}")


def _on_the_node(where: str, folder: str, name: str, command: str) -> None:
    """Runs a command in a pod that may write a folder of the node, at /folder."""
    spec = {
        "restartPolicy": "Never",
        "volumes": [{"name": "f", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}],
        "containers": [
            {
                "name": name,
                "image": CPU_IMAGE,
                "command": ["sh", "-c", command],
                "securityContext": {"runAsUser": 0},
                "volumeMounts": [{"name": "f", "mountPath": "/folder"}],
            }
        ],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    told("-n", where, "create", "-f", "-", given=json.dumps(pod))
    done = "--for=jsonpath={.status.phase}=Succeeded"
    told("-n", where, "wait", f"pod/{name}", done, f"--timeout={_DONE_S}s")
