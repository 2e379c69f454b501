"""Keys and TLS from Secrets: certificates on every hop, and an answer for whoever has a key."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from batonlm.client import AsyncClient
from batonlm.core.errors import BatonError, Unauthenticated
from tests.k8s.charts import COMPONENTS, ENGINES
from tests.k8s.cluster import Cluster
from tests.k8s.conftest import CPU_IMAGE, ENGINE_IMAGE
from tests.k8s.release import Release
from tests.rpc.authority import Authority, Files

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]

NAME = "baton-secured"
KEYS, KEY = f"{NAME}-keys", f"{NAME}-key"
PUBLIC = f"{NAME}-public"
QUESTION = "What is 3 + 4? " * 20
"""Long enough to be prefilled at the prefill worker."""
SECRETS_S = 300.0
"""The kubelet brings a changed Secret to its pods in its own time."""


@dataclass
class Secured:
    """A release, what clients need for it, and the file of keys that its Secret was made of."""

    release: Release
    ca: bytes
    key: str
    keys: Path


@pytest.fixture(scope="module")
def secured(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    router = f"{NAME}-router.{cluster.namespace}.svc"
    public = authority.host("public", router, "127.0.0.1")
    keys = folder / "keys.json"
    key = new_key(keys)
    given = {f"{NAME}-{one}-tls": authority.role(one) for one in COMPONENTS} | {PUBLIC: public}
    for name, files in given.items():
        cluster.kubectl("create", "secret", "generic", name, *from_files(files))
    cluster.kubectl("create", "secret", "generic", KEYS, f"--from-file={keys}")
    cluster.kubectl("create", "secret", "generic", KEY, f"--from-literal=api-key={key}")
    release = Release(
        cluster,
        CPU_IMAGE,
        ENGINE_IMAGE,
        name=NAME,
        values={
            "auth.allowAnonymous": "false",
            "auth.keysSecret": KEYS,
            "test.apiKeySecret": KEY,
            "tls.internal.enabled": "true",
            "tls.public.secretName": PUBLIC,
            "prefill.config.transport": "nixl",
            "decode.config.transport": "nixl",
        },
    )
    release.install()
    try:
        yield Secured(release, public.ca.read_bytes(), key, keys)
    finally:
        release.uninstall()
        cluster.kubectl("delete", "secret", *given, KEYS, KEY)


def from_files(files: Files) -> list[str]:
    named = {"tls.crt": files.cert, "tls.key": files.key, "ca.crt": files.ca}
    return [f"--from-file={name}={path}" for name, path in named.items()]


def new_key(keys: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "batonlm.cli.main",
        "keys",
        "new",
        "--tenant",
        "acme",
        str(keys),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def chat(secured: Secured, key: str) -> str:
    """Over gRPC, from outside, in TLS. Raises BatonError."""
    service = f"service/{secured.release.object('router')}"
    async with (
        secured.release.cluster.forward(service, 50051) as port,
        AsyncClient(f"127.0.0.1:{port}", api_key=key, tls=secured.ca) as client,
    ):
        return (
            await client.chat(QUESTION, max_tokens=16, temperature=0.0, timeout_s=120).read()
        ).text


def test_helm_test_is_green_with_a_key_over_tls(secured: Secured) -> None:
    secured.release.test()


async def test_kv_moves_between_workers_that_show_certificates(secured: Secured) -> None:
    assert await chat(secured, secured.key)
    for component in ENGINES:
        assert secured.release.metric(component, "baton_handover_bytes_total") > 0


@pytest.mark.parametrize("key", ["", "baton-of-nobody"])
async def test_nobody_else_is_answered(secured: Secured, key: str) -> None:
    with pytest.raises(Unauthenticated):
        await chat(secured, key)


async def test_a_key_that_the_secret_gets_opens_without_a_restart(secured: Secured) -> None:
    key = new_key(secured.keys)
    cluster = secured.release.cluster
    changed = cluster.kubectl(
        "create", "secret", "generic", KEYS, f"--from-file={secured.keys}",
        "--dry-run=client", "-o", "yaml",
    )  # fmt: skip
    cluster.kubectl("replace", "-f", "-", text=changed)
    until = time.monotonic() + SECRETS_S
    while True:
        try:
            assert await chat(secured, key)
            break
        except BatonError:
            assert time.monotonic() < until, f"the key opened nothing for {SECRETS_S:.0f} s"
            await asyncio.sleep(2)
    secured.release.check_never_restarted("router")
