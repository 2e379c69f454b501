"""EndpointSlices as Kubernetes writes them, to addresses."""

from __future__ import annotations

import pytest

from batonlm.router.workers.discovery_k8s import Endpoint, answers, endpoints, runs
from tests.services.router.kubernetes_api import Json, endpoint, slice_of


def one(entry: Json) -> Endpoint:
    (found,) = endpoints([slice_of("s", entry)], "grpc")
    return found


@pytest.mark.parametrize(
    ("conditions", "followed", "counted"),
    [
        ({}, True, True),
        ({"ready": None, "serving": None, "terminating": None}, True, True),
        ({"ready": True, "serving": True, "terminating": False}, True, True),
        ({"ready": False, "serving": False, "terminating": False}, True, False),
        ({"ready": False, "serving": True, "terminating": True}, False, False),
        ({"ready": False, "serving": False, "terminating": True}, False, False),
        # publishNotReadyAddresses: ready whatever happens.
        ({"ready": True, "serving": True, "terminating": True}, False, False),
    ],
)
def test_conditions(conditions: dict[str, bool | None], followed: bool, counted: bool) -> None:
    found = one(endpoint("10.0.0.1", **conditions))
    assert (runs(found), answers(found)) == (followed, counted)


def test_ports_by_name_and_by_number() -> None:
    slices = [
        slice_of("a", endpoint("10.0.0.1"), port=7000),
        slice_of("b", endpoint("10.0.0.2"), port=7001),
        {**slice_of("c", endpoint("10.0.0.3")), "ports": None},
    ]
    by_name = [each.address for each in endpoints(slices, "grpc")]
    assert by_name == ["10.0.0.1:7000", "10.0.0.2:7001"]
    by_number = [each.address for each in endpoints(slices, "5")]
    assert by_number == ["10.0.0.1:5", "10.0.0.2:5", "10.0.0.3:5"]


def test_a_pod_is_one_endpoint() -> None:
    pod = {"uid": "p"}
    four = {**endpoint("10.0.0.1"), "targetRef": pod}
    six = {**endpoint("fd00::1"), "targetRef": pod}
    lonely = {"addresses": ["fd00::2"]}
    slices = [
        slice_of("six", six, lonely, family="IPv6"),
        slice_of("four", four),
        slice_of("again", four),
        slice_of("names", endpoint("example.org"), family="FQDN"),
    ]
    found = [each.address for each in endpoints(slices, "grpc")]
    assert found == ["10.0.0.1:7000", "[fd00::2]:7000"]


def test_slices_that_are_empty() -> None:
    empty = {**slice_of("a"), "endpoints": None}
    assert endpoints([empty, slice_of("b", {"addresses": []})], "grpc") == ()
