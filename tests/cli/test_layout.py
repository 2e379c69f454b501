"""What `baton up` would start, without starting it."""

from __future__ import annotations

from pathlib import Path

import pytest

from batonlm.cli.layout import UpOptions, memory_flags, plan, resolve_model
from batonlm.core.errors import InvalidArgument


def flags(command: tuple[str, ...]) -> dict[str, str]:
    at = command.index("-m") + 2
    return dict(zip(command[at::2], command[at + 1 :: 2], strict=True))


def test_every_process_has_its_own_ports_and_the_router_knows_all() -> None:
    layout = plan(UpOptions(prefill=2, decode=3, tokenizer=2, detokenizer=1, routers=2))
    roles = [spec.role for spec in layout.processes]
    assert {role: roles.count(role) for role in roles} == {
        "tokenizer": 2,
        "prefill": 2,
        "decode": 3,
        "detokenizer": 1,
        "router": 2,
    }
    addresses = [a for spec in layout.processes for a in {spec.grpc, spec.metrics}]
    assert len(set(addresses)) == len(addresses)
    assert len({spec.name for spec in layout.processes}) == len(layout.processes)
    for router in (spec for spec in layout.processes if spec.role == "router"):
        known = flags(router.command)
        for role in ("tokenizer", "prefill", "decode", "detokenizer", "router"):
            wanted = [spec.grpc for spec in layout.processes if spec.role == role]
            assert known[f"--{role}s"].split(",") == wanted


def test_port_0_of_routers_is_a_free_one_that_is_named() -> None:
    layout = plan(UpOptions(http_port=0, grpc_port=0, routers=2))
    routers = [spec for spec in layout.processes if spec.role == "router"]
    http = [int(spec.metrics.rpartition(":")[2]) for spec in routers]
    grpc = [int(spec.grpc.rpartition(":")[2]) for spec in routers]
    assert http == [http[0], http[0] + 1]
    assert grpc == [grpc[0], grpc[0] + 1]
    assert min(*http, *grpc) > 0
    assert layout.http == f"http://127.0.0.1:{http[0]}"
    assert layout.grpc == f"127.0.0.1:{grpc[0]}"


def test_who_prefills_is_the_routers_own_choice_unless_it_is_told() -> None:
    told = {}
    for given in (-1, 0, 64):
        (router,) = (
            spec
            for spec in plan(UpOptions(local_prefill_tokens=given)).processes
            if spec.role == "router"
        )
        told[given] = flags(router.command).get("--local-prefill-tokens")
    assert told == {-1: None, 0: "0", 64: "64"}


def test_routers_serve_gateways_only_where_that_is_asked() -> None:
    told = []
    for given in (False, True):
        layout = plan(UpOptions(vllm_engine=given))
        (router,) = (spec for spec in layout.processes if spec.role == "router")
        told.append(flags(router.command))
    plain, engine = told
    assert not {"--vllm-engine", "--vllm-tokenizer"} & plain.keys()
    assert engine["--vllm-engine"] == "true"
    (tokenizer,) = (spec for spec in layout.processes if spec.role == "tokenizer")
    assert engine["--vllm-tokenizer"] == flags(tokenizer.command)["--model"]


def test_without_prefill_workers_the_router_is_told_of_none() -> None:
    layout = plan(UpOptions(prefill=0))
    assert "prefill" not in [spec.role for spec in layout.processes]
    assert "--prefills" not in layout.processes[-1].command


def test_engines_share_the_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert plan(UpOptions(prefill=2, decode=2)).threads == 2
    assert plan(UpOptions(prefill=8, decode=8)).threads == 1
    assert plan(UpOptions(threads=3)).threads == 3


def test_workers_are_given_their_ranks() -> None:
    layout = plan(UpOptions(tensor_parallel=2, pipeline_parallel=3))
    for process in layout.processes:
        ranked = process.role in ("prefill", "decode")
        assert ("--tensor-parallel" in process.command) is ranked
        if ranked:
            at = process.command.index("--pipeline-parallel")
            assert process.command[at + 1] == "3"
    with pytest.raises(InvalidArgument) as refused:
        plan(UpOptions(pipeline_parallel=0))
    assert refused.value.field == "pipeline_parallel"


def test_workers_of_several_ranks_share_gpus(tmp_path: Path) -> None:
    assert memory_flags(tmp_path, 2, 4, ranks=2) == ()
    assert memory_flags(tmp_path, 2, 2, ranks=2) == ("--memory-share", "0.450")


def test_pinning_goes_to_the_right_processes() -> None:
    for spec in plan(UpOptions(engine_cpus="0", other_cpus="1")).processes:
        core = "0" if spec.role in ("prefill", "decode") else "1"
        assert spec.command[:3] == ("taskset", "-c", core)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (UpOptions(decode=0), "decode"),
        (UpOptions(routers=0), "routers"),
        (UpOptions(tokenizer=-1), "tokenizer"),
        (UpOptions(prefill=-1), "prefill"),
        (UpOptions(model="/no/such/folder"), "model"),
        (UpOptions(model="a/b/c"), "model"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: UpOptions, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan(options)
    assert caught.value.field == field


def test_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve_model(str(folder)) == (folder, "my-model")
    bundled, name = resolve_model("")
    assert (bundled / "model.safetensors").exists()
    assert name == "baton-tiny"
