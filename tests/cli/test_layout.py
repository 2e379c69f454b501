"""What `baton up` would start, without starting it."""

from __future__ import annotations

import importlib
import re
import socket
import sys
from pathlib import Path

import pytest

from batonlm.cli.layout import UpOptions, check_machine, gpu_memory_flags, plan, resolve_model
from batonlm.cli.precision import read_weights
from batonlm.core.errors import InvalidArgument, install


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


def test_decode_workers_alone_get_the_draft_model() -> None:
    bundled = str(resolve_model("")[0])
    layout = plan(UpOptions(speculation="draft", draft_model=bundled))
    given = {spec.role: flags(spec.command).get("--draft-model") for spec in layout.processes}
    assert {role for role, folder in given.items() if folder == bundled} == {"decode"}
    small, large = (read_weights(Path(bundled)), read_weights(Path(bundled), bundled))
    assert large.count == 2 * small.count


def test_workers_of_several_ranks_share_gpus() -> None:
    assert gpu_memory_flags(4, 4) == ()
    assert gpu_memory_flags(4, 2) == ("--memory-share", "0.450")


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
        (UpOptions(speculation="draft"), "speculation"),
        (UpOptions(draft_model="/some/folder"), "draft_model"),
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


def router_of(options: UpOptions) -> dict[str, str]:
    return flags(next(s for s in plan(options).processes if s.role == "router").command)


def test_routers_alone_listen_beyond_this_machine() -> None:
    layout = plan(UpOptions(host="0.0.0.0", keys="keys.json", http_port=8123, grpc_port=8124))
    for spec in layout.processes:
        listens = [v for k, v in flags(spec.command).items() if k.endswith("listen")]
        host = "0.0.0.0" if spec.role == "router" else "127.0.0.1"
        assert all(address.startswith(f"{host}:") for address in listens)
    # This machine's own commands connect there.
    assert (layout.http, layout.grpc) == ("http://127.0.0.1:8123", "127.0.0.1:8124")
    with pytest.raises(InvalidArgument, match="show keys") as caught:
        plan(UpOptions(host="0.0.0.0"))
    assert caught.value.field == "host"
    assert plan(UpOptions(host="0.0.0.0", allow_anonymous=True))


def test_names_length_and_origins_reach_the_processes() -> None:
    options = UpOptions(
        served_model_name=("tiny", "gpt-4o"),
        max_model_len=512,
        cors_origin=("http://a", "http://b"),
    )
    router = router_of(options)
    assert (router["--model"], router["--model-aliases"]) == ("tiny", "gpt-4o")
    assert router["--cors-origins"] == "http://a,http://b"
    for spec in plan(options).processes:
        given = flags(spec.command)
        if spec.role != "router":
            assert given["--model-name"] == "tiny"
        if spec.role in ("prefill", "decode"):
            assert given["--max-model-len"] == "512"
    plain = router_of(UpOptions())
    assert not {"--model", "--model-aliases", "--cors-origins", "--allow-anonymous"} & plain.keys()


def test_a_taken_port_is_named_before_a_process_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match=f"127.0.0.1:{port} is already in use") as caught:
            check_machine(UpOptions(http_port=port, grpc_port=0, transport="loopback"))
        assert caught.value.field == "http_port"
    with pytest.raises(InvalidArgument) as caught:
        check_machine(UpOptions(http_port=0, grpc_port=70000, transport="loopback"))
    assert caught.value.field == "grpc_port"


@pytest.mark.parametrize(
    ("present", "said"),
    (
        ((), "no config.json"),
        (("config.json",), "no tokenizer.json"),
        (("config.json", "tokenizer.json"), "no weights"),
    ),
)
def test_what_a_model_folder_lacks_is_named(
    present: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    for name in present:
        (tmp_path / name).write_text("{}")
    options = UpOptions(model=str(tmp_path), http_port=0, grpc_port=0, transport="loopback")
    with pytest.raises(InvalidArgument, match=said) as caught:
        check_machine(options)
    assert caught.value.field == "model"


def test_a_missing_package_is_answered_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "smg_grpc_proto"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    with pytest.raises(InvalidArgument, match=re.escape(install("vllm"))) as caught:
        check_machine(UpOptions(runner="fake", transport="loopback", vllm_engine=True))
    assert caught.value.field == "vllm_engine"


def copied(tmp_path: Path, *names: str) -> list[Path]:
    """Folders of the bundled model under other names; all but the first have another tokenizer."""
    bundled = resolve_model("")[0]
    folders = [tmp_path / name for name in names]
    for index, folder in enumerate(folders):
        folder.mkdir()
        for file in bundled.iterdir():
            (folder / file.name).symlink_to(file)
        if index:
            (folder / "special_tokens_map.json").write_text("{}")
    return folders


def test_models_have_their_own_workers_and_share_what_they_can(tmp_path: Path) -> None:
    large, small = map(str, copied(tmp_path, "large", "small"))
    options = UpOptions(
        model=large,
        more_models=(f"fast={small},prefill=0,decode=2,dtype=bfloat16,quantize=int8", ""),
        tokenizer=2,
        threads=3,
    )
    found = [
        (spec.role, spec.model, flags(spec.command))
        for spec in plan(options).processes
        if spec.role != "router"
    ]
    assert [(role, model) for role, model, _ in found] == [
        *[("tokenizer", "large,baton-tiny")] * 2,
        *[("tokenizer", "fast")] * 2,
        ("prefill", "large"),
        ("prefill", "baton-tiny"),
        ("decode", "large"),
        *[("decode", "fast")] * 2,
        ("decode", "baton-tiny"),
        ("detokenizer", "large,baton-tiny"),
        ("detokenizer", "fast"),
    ]
    for role, model, given in found:
        first = model.partition(",")[0]
        assert given["--model-name"] == first
        assert Path(given["--model"]).name == {"fast": "small"}.get(first, first)
        if role in ("prefill", "decode"):
            assert given["--quantize"] == ("int8" if first == "fast" else "none")
            assert first != "fast" or given["--dtype"] == "bfloat16"
            assert given["--threads"] == "3"
    shares = {given["--kv-memory-mib"] for role, _, given in found if "tokenizer" not in role}
    assert len(shares) == 1
    assert router_of(options)["--model"] == "large,fast,baton-tiny"
    addresses = router_of(options)["--decodes"].split(",")
    assert len(set(addresses)) == 4


@pytest.mark.parametrize(
    ("texts", "field", "said"),
    [
        (("", ""), "model", "two models are called 'baton-tiny': give one another name"),
        (("", "=x"), "model", "has no name before ="),
        (("", "b=,decodes=2"), "model", "no option 'decodes'; did you mean 'decode'?"),
        (("", "b=,http_port=2"), "model", "no option 'http_port'"),
        (("", "b=,decode=two"), "model", "'decode=two' is no whole number"),
        (("", "b=,dtype=float8"), "model", "'dtype=float8' is not one of auto, float32"),
        (("", "b=,decode=0"), "decode", "at least 1"),
        (("", "b=,kv-memory-mib=1000000000"), "model", "b: 2 engine processes would each take"),
        (("", "b=/no/such/folder"), "model", "there is no model folder '/no/such/folder'"),
    ],
)
def test_what_a_model_of_several_cannot_have_is_named(
    texts: tuple[str, ...], field: str, said: str
) -> None:
    first, *more = texts
    with pytest.raises(InvalidArgument, match=re.escape(said)) as caught:
        plan(UpOptions(model=first, more_models=tuple(more)))
    assert caught.value.field == field


def test_what_only_one_model_can_have_is_refused_for_several() -> None:
    for changed in ({"served_model_name": ("a", "b")}, {"vllm_engine": True}):
        with pytest.raises(InvalidArgument) as caught:
            plan(UpOptions(more_models=("b=",), **changed))
        assert caught.value.field in changed
    with pytest.raises(InvalidArgument, match="names it too"):
        plan(UpOptions(model="a=", served_model_name=("b",)))


def test_a_folder_whose_name_looks_like_options_is_a_folder(tmp_path: Path) -> None:
    (folder,) = copied(tmp_path, "a=b,decode=7")
    layout = plan(UpOptions(model=str(folder)))
    assert [spec.role for spec in layout.processes].count("decode") == 1
    with pytest.raises(InvalidArgument, match="has a comma"):
        plan(UpOptions(model=str(folder), more_models=("",)))
