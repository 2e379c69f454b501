"""TLS between processes: who gets in, who may call what, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonlm.cli.ports import free_ports
from batonlm.core.errors import Internal, InvalidArgument
from batonlm.rpc import tls
from batonlm.rpc.channels import Channels, open_channel
from batonlm.rpc.options import TlsOptions
from batonlm.rpc.peers import CALLERS, ROLES
from batonlm.rpc.server import Probes, ProcessServer, Service
from batonlm.rpc.tls import Certificates
from tests.rpc.authority import Authority, Files

PATIENCE_S = 120.0
PREFILL = "baton.v1.Prefill"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files are seen by whoever looks next."""
    monkeypatch.setattr(tls, "LOOK_S", 0.0)


@asynccontextmanager
async def serving(certificates: Certificates, *names: str) -> AsyncIterator[str]:
    """Services of these names with `who`, the caller's certificate, and `echo`, a stream."""

    async def who(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        (shown,) = context.auth_context()["x509_pem_cert"]
        return shown

    async def echo(
        requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    # The stubs know the handlers of the threaded server only.
    handlers: dict[str, Any] = {
        "who": grpc.unary_unary_rpc_method_handler(_any(who)),
        "echo": grpc.stream_stream_rpc_method_handler(_any(echo)),
    }

    def service(name: str) -> Service:
        generic = grpc.method_handlers_generic_handler(name, handlers)
        return Service(name, lambda server: server.add_generic_rpc_handlers((generic,)))

    server = ProcessServer(
        listen="127.0.0.1:0", services=[service(name) for name in names], certificates=certificates
    )
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def who(channel: grpc.aio.Channel, service: str = PREFILL) -> bytes:
    """What the server saw of us."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{service}/who")
    return await call(b"", timeout=PATIENCE_S)


async def refused(call: Awaitable[Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_every_role_may_call_what_the_table_says_and_nothing_else(
    authority: Authority,
) -> None:
    async with serving(authority.role("prefill").certificates(), *CALLERS, "test.Other") as address:
        for role in ROLES:
            async with open_channel(
                address, authority.role(role).certificates(), "prefill"
            ) as channel:
                for service in (*CALLERS, "test.Other"):
                    if service.startswith("grpc."):
                        continue  # the real ones are served under these names
                    if role in CALLERS.get(service, ()):
                        assert b"BEGIN CERTIFICATE" in await who(channel, service)
                    else:
                        code = await refused(who(channel, service))
                        assert code is grpc.StatusCode.UNAUTHENTICATED, (role, service)


async def test_who_shows_nothing_or_something_wrong_is_not_let_in(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger")
    async with serving(authority.role("prefill").certificates(), PREFILL) as address:
        router = authority.role("router")
        wrong: dict[str, grpc.aio.Channel] = {
            "wrong CA": open_channel(
                address, stranger.role("router", ca=authority).certificates(), "prefill"
            ),
            "expired": open_channel(
                address, authority.role("late", expired=True).certificates(), "prefill"
            ),
            "no TLS": open_channel(address),
            "no certificate": grpc.aio.secure_channel(
                address,
                grpc.ssl_channel_credentials(router.ca.read_bytes()),
                options=(("grpc.ssl_target_name_override", "prefill.baton.internal"),),
            ),
        }
        for what, channel in wrong.items():
            async with channel:
                assert await refused(who(channel)) is UNAVAILABLE, what
        async with open_channel(address, router.certificates(), "prefill") as channel:
            assert await who(channel)


@pytest.mark.parametrize("posing", ["decode", "router", "detokenizer"])
async def test_a_worker_cannot_pose_as_another_role(authority: Authority, posing: str) -> None:
    async with (
        serving(authority.role(posing).certificates(), PREFILL) as address,
        open_channel(address, authority.role("router").certificates(), "prefill") as channel,
    ):
        assert await refused(who(channel)) is UNAVAILABLE


async def test_a_server_of_another_ca_or_an_expired_one_is_not_believed(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger")
    router = authority.role("router").certificates()
    for files in (
        stranger.role("prefill", ca=authority),
        authority.role("prefill", expired=True),
    ):
        async with (
            serving(files.certificates(), PREFILL) as address,
            open_channel(address, router, "prefill") as channel,
        ):
            assert await refused(who(channel)) is UNAVAILABLE


async def test_old_tls_is_refused(authority: Authority) -> None:
    router = authority.role("router")

    def shake_hands(address: str, version: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(router.ca))
        context.load_cert_chain(router.cert, router.key)
        context.set_alpn_protocols(["h2"])
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw,
            context.wrap_socket(raw, server_hostname="prefill.baton.internal") as connection,
        ):
            return connection.version()

    async with serving(authority.role("prefill").certificates(), PREFILL) as address:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(shake_hands, address, ssl.TLSVersion.TLSv1_1)
        told = await asyncio.to_thread(shake_hands, address, ssl.TLSVersion.TLSv1_2)
        assert told == "TLSv1.2"


async def test_certificates_are_replaced_while_a_stream_runs_and_no_call_fails(
    authority: Authority, at_once: None
) -> None:
    sender, taker = authority.role("prefill"), authority.role("router")
    async with serving(sender.certificates(), PREFILL) as address:
        channels = Channels(taker.certificates())
        channel = channels.get(address, "prefill")
        stream: Any = channel.stream_stream(f"/{PREFILL}/echo")(timeout=PATIENCE_S)
        await stream.write(b"before")
        assert await stream.read() == b"before"
        before = await who(channel)
        seen = {before}
        for _ in range(5):
            authority.role("prefill")
            authority.role("router")
            seen |= set(await asyncio.gather(*(who(channel) for _ in range(20))))
            await stream.write(b"still here")
            assert await stream.read() == b"still here"
        assert len(seen) == 6, "every set of files was used"
        shown = await asyncio.to_thread(_server_certificate, address, taker)
        assert shown.strip() == sender.cert.read_bytes().strip().decode()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await channels.close()


async def test_files_that_do_not_fit_leave_the_old_ones_in_place(
    authority: Authority, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.role("router")
    certificates = files.certificates()
    first = certificates.current()
    fitting = files.key.read_bytes()
    caplog.set_level(logging.DEBUG)
    breaks: tuple[Callable[[], object], ...] = (
        lambda: files.key.write_bytes(authority.host("other", "x").key.read_bytes()),
        lambda: files.key.write_bytes(b"half a k"),
        files.key.unlink,
    )
    for breaking in breaks:
        breaking()
        assert certificates.current() is first
        assert certificates.current() is first
    assert "cannot be used" in caplog.text
    assert "PRIVATE" not in caplog.text
    assert fitting.decode() not in caplog.text
    renewed = authority.role("router")
    assert certificates.current().cert == renewed.cert.read_bytes()
    assert certificates.current() is certificates.current()


async def test_a_mounted_secret_is_followed_through_its_links(
    authority: Authority, tmp_path: Path, at_once: None
) -> None:
    """Kubernetes links each file through a folder's link, and turns that one link."""
    old, new = authority.host("old", "x"), authority.host("new", "x")
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(old.cert.parent)
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (mount / name).symlink_to(Path("..data") / name)
    linked = Files(mount / "cert.pem", mount / "key.pem", mount / "ca.pem")
    certificates = linked.certificates()
    assert certificates.current().cert == old.cert.read_bytes()
    (mount / "..fresh").symlink_to(new.cert.parent)
    (mount / "..fresh").rename(mount / "..data")
    assert certificates.current().cert == new.cert.read_bytes()


def test_what_is_missing_or_wrong_is_named(authority: Authority) -> None:
    files = authority.role("router")
    with pytest.raises(InvalidArgument) as caught:
        TlsOptions(tls_cert=str(files.cert), tls_key=str(files.key))
    assert caught.value.field == "tls_ca"
    with pytest.raises(InvalidArgument) as caught:
        Certificates(str(files.cert), str(files.ca), str(files.ca))
    assert caught.value.field == "tls_cert"
    assert TlsOptions().certificates() is None


async def test_a_peer_without_a_role_is_not_connected_to(authority: Authority) -> None:
    channels = Channels(authority.role("router").certificates())
    with pytest.raises(Internal):
        channels.get("127.0.0.1:1")
    await channels.close()


async def test_one_address_is_checked_for_each_role_that_is_meant(authority: Authority) -> None:
    async with serving(authority.role("prefill").certificates(), PREFILL) as address:
        channels = Channels(authority.role("router").certificates())
        try:
            assert await who(channels.get(address, "prefill"))
            assert await refused(who(channels.get(address, "decode"))) is UNAVAILABLE
            assert channels.get(address, "prefill") is channels.get(address, "prefill")
        finally:
            await channels.close()


async def test_health_alone_answers_in_plain_text_where_that_was_said(
    authority: Authority,
) -> None:
    health_listen = f"127.0.0.1:{free_ports(1)[0]}"
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[],
        probes=Probes(health_listen=health_listen),
        certificates=authority.role("prefill").certificates(),
    )
    await server.start()
    server.set_serving(True)
    async with open_channel(health_listen) as channel:
        asked = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await refused(who(channel)) is grpc.StatusCode.UNIMPLEMENTED
        reflect = "grpc.reflection.v1alpha.ServerReflection"
        assert await refused(who(channel, reflect)) is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


def test_ports_and_channels_are_opened_in_one_place() -> None:
    import batonlm

    folder = Path(next(iter(batonlm.__path__)))
    words = ("insecure_channel", "secure_channel", "insecure_port", "secure_port")
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.parts[-2] != "v1" and any(word in path.read_text() for word in words)
    }
    assert found == {"rpc/channels.py"}


def _server_certificate(address: str, client: Files) -> str:
    context = ssl.create_default_context(cafile=str(client.ca))
    context.load_cert_chain(client.cert, client.key)
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw,
        context.wrap_socket(raw, server_hostname="prefill.baton.internal") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return ssl.DER_cert_to_PEM_cert(found)


def _any(handler: Any) -> Any:
    return handler
