"""Where a router may listen without keys or TLS."""

from __future__ import annotations

import dataclasses

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.router.api.access import exposure_warnings
from batonlm.router.config import RouterConfig
from batonlm.rpc.options import ServingOptions

BEYOND = ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "host.example:1", "localhost.example:1")
LOOPBACK = ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1")


def told(config: RouterConfig) -> list[str]:
    return list(
        exposure_warnings(
            config.faces,
            keys=bool(config.keys),
            tls=bool(config.public_tls_cert),
            tls_terminated=config.tls_terminated,
        )
    )


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_needs_nothing(address: str) -> None:
    assert told(RouterConfig(http_listen=address, grpc_listen=address)) == []


@pytest.mark.parametrize("address", BEYOND)
@pytest.mark.parametrize("face", ["http_listen", "grpc_listen"])
def test_other_addresses_need_keys_or_a_flag_that_warns(face: str, address: str) -> None:
    for more in ({}, {"public_tls_cert": "c", "public_tls_key": "k"}, {"tls_terminated": True}):
        with pytest.raises(InvalidArgument) as caught:
            RouterConfig(**{face: address}, **more)  # type: ignore[arg-type]
        assert caught.value.field == face
    opened = RouterConfig(**{face: address}, allow_anonymous=True)  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in told(opened)] == [face]
    plain = RouterConfig(**{face: address}, keys="f")  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in told(plain)] == [face]
    assert told(dataclasses.replace(plain, tls_terminated=True)) == []
    assert told(dataclasses.replace(plain, public_tls_cert="c", public_tls_key="k")) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"keys": "f", "allow_anonymous": True}, "allow_anonymous"),
        ({"public_tls_cert": "c"}, "public_tls_key"),
        ({"public_tls_ca": "c"}, "public_tls_cert"),
        ({"tls_cert": "c", "tls_ca": "a"}, "tls_key"),
    ],
)
def test_contradictions_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(**options)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("address", BEYOND)
def test_workers_beyond_loopback_need_certificates_or_a_flag(address: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServingOptions(listen=address)
    assert caught.value.field == "listen"
    ServingOptions(listen=address, allow_anonymous=True)
    ServingOptions(listen=address, tls_cert="c", tls_key="k", tls_ca="a")
