"""What the chart makes of values: its files and presets, rendered by helm; no cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

import gen_values_schema as generator
from baton_loadtest.autoscale.process import PlannerConfig
from batonlm.registry.object_store import ObjectSource
from batonlm.registry.sources import FolderSource, HubSource
from batonlm.rpc import config as configuration
from batonlm.rpc.address import AllowedHosts
from batonlm.worker.machine import MachineConfig
from tests.k8s.charts import (
    CHART,
    COMPONENTS,
    CPU,
    ENGINES,
    GPU_SETS,
    PRESETS,
    TWO_NODES,
    VALUES_FILES,
    Json,
    environment,
    helm,
    of_kind,
    pods,
    render,
    rendered,
    stack,
    templates,
)

pytestmark = pytest.mark.k8s

FILES = [*VALUES_FILES, *PRESETS]
EVERYTHING = CHART / "ci/everything-values.yaml"

READY = {
    "router": "baton.v1.Inference",
    "tokenizer": "baton.v1.Tokenizer",
    "prefill": "baton.v1.Prefill",
    "decode": "baton.v1.Decode",
    "detokenizer": "baton.v1.Detokenizer",
}

MODELS = CHART / "ci/models-values.yaml"
STORED, URL = CHART / "ci/aggregated-values.yaml", "s3://models/qwen3-8b@v2"


def role(component: str) -> str:
    """Of a component, which begins with the key of its model where it is one of `models`."""
    return component.rpartition("-")[2]


every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_are_eleven_values_files_and_six_presets() -> None:
    assert (len(VALUES_FILES), len(PRESETS)) == (11, 6)


@pytest.mark.parametrize("path", [None, *FILES], ids=lambda path: path.stem if path else "none")
def test_lint(path: Path | None) -> None:
    files = stack(path) if path else []
    helm("lint", "--strict", str(CHART), *(part for file in files for part in ("-f", str(file))))


@every_file
def test_every_file_gives_five_pools_with_their_services(path: Path) -> None:
    objects = rendered(path)
    assert set(map(role, templates(objects))) == set(COMPONENTS)
    services = of_kind(objects, "Service")
    for component in COMPONENTS:
        selector = services[component]["spec"]["selector"]
        labels = templates(objects)[component]["metadata"]["labels"]
        assert selector.items() <= labels.items()


@every_file
def test_names_are_unique_and_short_enough(path: Path) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(path)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@every_file
def test_the_process_takes_its_environment(path: Path) -> None:
    """Every BATON_ variable is an option, and all of them together are a configuration."""
    for component, pod in pods(rendered(path)).items():
        if component == "test":
            continue
        cls = generator.CONFIGS[role(component)]
        given = environment(pod)
        options = {f"BATON_{field.name.upper()}" for field in fields(cls)}
        assert {name for name in given if name.startswith("BATON_")} <= options
        configuration.load(cls, [], given, prog=f"baton-{component}")


@every_file
def test_workers_are_found_where_their_services_are(path: Path) -> None:
    objects = rendered(path)
    router = environment(pods(objects)["router"])
    for component, service in of_kind(objects, "Service").items():
        variable = f"BATON_{component.upper()}S"
        where = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
        if variable in router and not where.partition(".")[0].endswith("-metrics"):
            assert router[variable] == f"k8s:///{where}:grpc"
            assert "grpc" in {port["name"] for port in service["spec"]["ports"]}


@every_file
def test_probes_mean_different_things(path: Path) -> None:
    for component, pod in pods(rendered(path)).items():
        if component == "test":
            continue
        container = pod["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [
            container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")
        ]
        assert {probe["port"] for probe in probes} == {ports["health"]}
        services = [probe.get("service", "") for probe in probes]
        assert services == ["startup", READY[role(component)], ""]
        assert environment(pod)["BATON_HEALTH_LISTEN"].endswith(f":{ports['health']}")


@every_file
def test_only_a_router_has_a_token(path: Path) -> None:
    for component, pod in pods(rendered(path)).items():
        assert pod["automountServiceAccountToken"] is (component == "router")


@every_file
def test_a_pod_gets_the_time_that_leaving_takes(path: Path) -> None:
    for component, pod in pods(rendered(path)).items():
        if component == "test":
            continue
        said = environment(pod)
        sleep = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        leaving = sleep.get("seconds", 0) + float(said["BATON_DRAIN_TIMEOUT_S"])
        if lame_duck := float(said.get("BATON_LAME_DUCK_S", 0)):
            leaving += lame_duck + 1.1 * float(said["BATON_CONNECTION_MAX_AGE_S"])
        assert leaving < pod["terminationGracePeriodSeconds"] <= leaving + 15


def test_a_longer_drain_gets_more_time() -> None:
    def grace(*sets: str) -> int:
        pod = pods(render(CPU, sets=sets))["decode"]
        return int(pod["terminationGracePeriodSeconds"])

    assert grace("decode.config.drain_timeout_s=600") == grace() + 540
    assert grace("decode.preStopSeconds=12") == grace() + 10


def test_numbers_stay_numbers() -> None:
    sets = ("tokenizer.config.max_input_bytes=2097152", "tokenizer.config.log_json=false")
    said = environment(pods(render(CPU, sets=sets))["tokenizer"])
    assert said["BATON_MAX_INPUT_BYTES"] == "2097152"
    assert said["BATON_LOG_JSON"] == "false"


def test_an_autoscaler_owns_the_number_of_pods() -> None:
    deployments = of_kind(rendered(EVERYTHING), "Deployment")
    assert not any("replicas" in each["spec"] for each in deployments.values())
    assert all("replicas" in d["spec"] for d in of_kind(rendered(CPU), "Deployment").values())


def test_a_gpu_comes_with_its_image_and_its_device() -> None:
    found = pods(rendered(CHART / "values-gpu-rdma.yaml"))
    for component in COMPONENTS:
        container = found[component]["containers"][0]
        limits = container["resources"]["limits"]
        assert ("nvidia.com/gpu" in limits) is (component in ENGINES)
        assert ("rdma/hca_shared" in limits) is (component in ENGINES)
        added = container["securityContext"]["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if component in ENGINES else [])
        image = "baton-engine-gpu" if component in ENGINES else "baton-cpu"
        assert container["image"].startswith(f"{image}:")


@pytest.mark.parametrize(("size", "ranks", "startup_s"), [("70b", 4, 3600), ("405b", 8, 7200)])
def test_a_large_models_ranks_have_a_gpu_each_and_time_to_load(
    size: str, ranks: int, startup_s: int
) -> None:
    found = pods(rendered(CHART / f"values-gpu-{size}.yaml"))
    for component in ENGINES:
        container = found[component]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
        assert container["resources"]["limits"]["rdma/hca_shared"] == 1, "the network's stays"
        assert environment(found[component])["BATON_TENSOR_PARALLEL"] == str(ranks)
        startup = container["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] == startup_s


def fits(each: Json, schema: str) -> None:
    """Whether an object has the fields that its kind's definition has, by a file of these tests,
    and no other one."""
    validator = Draft7Validator(json.loads((Path(__file__).parent / schema).read_text()))
    errors = list(validator.iter_errors(each))
    assert not errors, errors[0].message


def test_a_group_of_two_nodes_is_a_leader_worker_set() -> None:
    groups = of_kind(rendered(TWO_NODES), "LeaderWorkerSet")
    assert set(groups) == set(ENGINES)
    for group in groups.values():
        fits(group, "lws.json")
        assert group["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_an_inference_pool_is_of_routers_that_answer_http() -> None:
    objects = rendered(EVERYTHING)
    (pool,) = of_kind(objects, "InferencePool").values()
    fits(pool, "inferencepool.json")
    router = templates(objects)["router"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()
    ports = {port["containerPort"] for port in router["spec"]["containers"][0]["ports"]}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    with pytest.raises(AssertionError, match="noSuchField"):
        fits({**pool, "spec": {**pool["spec"], "noSuchField": 1}}, "inferencepool.json")


def test_the_other_pod_of_a_group_joins_its_leader() -> None:
    """With the leader's token, at the leader's port, and by no Service."""
    objects = rendered(TWO_NODES)
    for group in of_kind(objects, "LeaderWorkerSet").values():
        made = group["spec"]["leaderWorkerTemplate"]
        leader, other = (made[f"{kind}Template"]["spec"] for kind in ("leader", "worker"))
        given, joining = environment(leader), environment(other)
        assert given["BATON_RANKS_LISTEN"].endswith(joining["BATON_LEADER"])
        tokens = [
            entry["valueFrom"]
            for pod in (leader, other)
            for entry in pod["containers"][0]["env"]
            if entry["name"] == "BATON_RANKS_TOKEN"
        ]
        assert tokens[0] == tokens[1] and len(tokens) == 2
        assert other["containers"][0]["args"] == ["baton-ranks"]
        assert other["terminationGracePeriodSeconds"] >= leader["terminationGracePeriodSeconds"]
        gpus = [
            pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in (leader, other)
        ]
        ranks = int(given["BATON_TENSOR_PARALLEL"]) * int(given["BATON_PIPELINE_PARALLEL"])
        assert sum(gpus) == ranks
        labels = made["workerTemplate"]["metadata"]["labels"]
        for service in of_kind(objects, "Service").values():
            assert not service["spec"]["selector"].items() <= labels.items()
        assert _may_reach(objects, labels, made["leaderTemplate"]["metadata"]["labels"])
        assert _may_reach(objects, made["leaderTemplate"]["metadata"]["labels"], labels)
        assert not _may_reach(objects, templates(objects)["router"]["metadata"]["labels"], labels)
        options = {f"BATON_{field.name.upper()}" for field in fields(MachineConfig)}
        assert {name for name in joining if name.startswith("BATON_")} <= options


def test_with_ray_a_pool_is_workers_whose_other_machines_are_rays() -> None:
    sets = (
        *GPU_SETS,
        "decode.machines.rayAddress=head.ray:6379",
        "decode.image.repository=baton-engine-gpu-ray",
    )
    objects = render(*stack(TWO_NODES), sets=sets)
    assert set(of_kind(objects, "LeaderWorkerSet")) == {"prefill"}
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    names = {each["metadata"]["name"] for each in policies if "-ranks" in each["metadata"]["name"]}
    assert names == {"try-baton-prefill-ranks"}
    given = environment(pods(objects)["decode"])
    assert given["BATON_RAY_ADDRESS"] == "head.ray:6379"
    assert given["BATON_MACHINES"] == "2"
    assert given["BATON_RANKS_LISTEN"] == "198.18.1.9:50053"
    assert "BATON_RANKS_TOKEN" not in given


def _may_reach(objects: Sequence[Json], source: Json, target: Json) -> bool:
    """Whether a policy lets pods with these labels in, at all ports."""
    return any(
        peer["podSelector"]["matchLabels"].items() <= source.items()
        for policy in objects
        if policy["kind"] == "NetworkPolicy"
        and policy["spec"]["podSelector"]["matchLabels"].items() <= target.items()
        for rule in policy["spec"]["ingress"]
        if "ports" not in rule
        for peer in rule["from"]
    )


@pytest.mark.parametrize("autoscaler", ["decode.autoscaling", "decode.keda"])
def test_a_pool_of_groups_is_scaled_as_one(autoscaler: str) -> None:
    objects = render(*stack(TWO_NODES), sets=(*GPU_SETS, f"{autoscaler}.enabled=true"))
    kind = "ScaledObject" if autoscaler.endswith("keda") else "HorizontalPodAutoscaler"
    target = of_kind(objects, kind)["decode"]["spec"]["scaleTargetRef"]
    group = of_kind(objects, "LeaderWorkerSet")["decode"]
    assert target["kind"] == "LeaderWorkerSet"
    assert target["apiVersion"] == group["apiVersion"]
    assert target["name"] == group["metadata"]["name"]
    assert "replicas" not in group["spec"]


@pytest.mark.parametrize("component", ["prefill", "decode"])
def test_what_runs_the_model_is_scaled_by_what_routers_ask_for(component: str) -> None:
    """By nothing else, unless it is said: workers' own queues and KV do not show an overload."""
    objects = render(CPU, sets=(f"{component}.autoscaling.enabled=true",))
    (metric,) = of_kind(objects, "HorizontalPodAutoscaler")[component]["spec"]["metrics"]
    asked = metric["external"]
    assert asked["metric"]["name"] == "baton_pool_target_workers"
    labels = asked["metric"]["selector"]["matchLabels"]
    assert labels == {"role": component, "service": "try-baton-router-metrics"}
    assert asked["target"] == {"type": "AverageValue", "averageValue": "1"}
    objects = render(CPU, sets=(f"{component}.keda.enabled=true",), namespace="here")
    (trigger,) = of_kind(objects, "ScaledObject")[component]["spec"]["triggers"]
    routers = 'namespace="here",pod=~"try-baton-router-.*"'
    query = f'sum(max by (model) (baton_pool_target_workers{{{routers},role="{component}"}}))'
    assert trigger["metadata"]["query"] == query
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    own = (f"{component}.autoscaling.targetWorkers=false", f"{component}.autoscaling.targetCPU=50")
    objects = render(CPU, sets=(f"{component}.autoscaling.enabled=true", *own))
    (metric,) = of_kind(objects, "HorizontalPodAutoscaler")[component]["spec"]["metrics"]
    assert metric["type"] == "Resource"


def test_the_planner_serves_the_number_to_the_api_server() -> None:
    objects = render(CPU, sets=("planner.enabled=true", "prefill.autoscaling.enabled=true"))
    (service,) = of_kind(objects, "APIService").values()
    secret, server = of_kind(objects, "Secret")["planner"], of_kind(objects, "Service")["planner"]
    # The API server trusts what the planner shows, and the HPA asks by the labels that it serves.
    assert service["spec"]["caBundle"] == secret["data"]["tls.crt"]
    assert service["spec"]["service"]["name"] == server["metadata"]["name"]
    (port,) = server["spec"]["ports"]
    container = pods(objects)["planner"]["containers"][0]
    assert port["targetPort"] in [one["name"] for one in container["ports"]]
    options = configuration.options_of(PlannerConfig)
    given = {
        name.removeprefix("BATON_").lower(): value
        for name, value in environment(pods(objects)["planner"]).items()
    }
    assert given.keys() <= options.keys()
    made = PlannerConfig(
        **{
            name: configuration.parse(options[name], value, "the chart")
            for name, value in given.items()
        }
    )
    assert (made.release, made.scale, made.listen) == ("try-baton", (), "0.0.0.0:6443")
    labels = of_kind(objects, "HorizontalPodAutoscaler")["prefill"]["spec"]["metrics"][0]
    named = labels["external"]["metric"]["selector"]["matchLabels"]["service"]
    assert named == f"{made.release}-router-metrics"
    policy = of_kind(objects, "NetworkPolicy")["router"]["spec"]["ingress"]
    asked = [rule["from"] for rule in policy if rule["ports"] == [{"port": "metrics"}]]
    assert "planner" in json.dumps(asked)


def test_a_planner_may_set_the_sizes_that_it_is_given_and_nothing_else() -> None:
    sets = ("planner.enabled=true", "planner.externalMetrics=false")
    pool = ("planner.scale.decode.enabled=true", "planner.scale.decode.maxReplicas=4")
    objects = render(CPU, sets=(*sets, *pool))
    assert environment(pods(objects)["planner"])["BATON_SCALE"] == "decode=1:4"
    rules = of_kind(objects, "Role")["planner"]["rules"]
    writes = [rule for rule in rules if {"update", "patch", "delete"} & set(rule["verbs"])]
    assert [rule["resources"] for rule in writes] == [["deployments/scale"], ["leases"]]
    assert all(rule["resourceNames"] for rule in writes)
    assert not of_kind(objects, "APIService") and not of_kind(objects, "Secret")
    # Without a pool it may only find routers.
    objects = render(CPU, sets=("planner.enabled=true",))
    (rule,) = of_kind(objects, "Role")["planner"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["list"])
    assert not [each for each in render(CPU) if "planner" in each["metadata"]["name"]]


def test_each_model_has_pools_of_its_own_that_say_what_the_releases_do_not() -> None:
    found = pods(rendered(MODELS))
    own = {key.partition("-")[0] for key in found if "-" in key}
    assert own == {"large", "tuned"}
    assert not {"tuned-tokenizer", "tuned-detokenizer"} & found.keys(), "it shares the release's"
    names = {key: environment(pod).get("BATON_MODEL_NAME") for key, pod in found.items()}
    assert names["decode"] == "baton-tiny" and names["large-tokenizer"] == "Qwen/Qwen3-32B"
    assert names["tuned-decode"] == names["tuned-prefill"] == "baton-tuned"
    large, tuned = found["large-decode"], environment(found["tuned-decode"])
    assert large["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert environment(large)["BATON_MODEL"] == "/models/Qwen--Qwen3-32B"
    assert environment(found["large-tokenizer"])["BATON_MODEL"].endswith(".tokenizer")
    (cache,) = [volume for volume in large["volumes"] if volume["name"] == "models"]
    assert cache["hostPath"]["path"] == "/var/lib/models"
    assert tuned["BATON_DTYPE"] == "bfloat16" and tuned["BATON_ADAPTERS_FOLDER"] == "/adapters"
    # What is not said is the release's own; what is, is nobody else's.
    assert tuned["BATON_DRAIN_TIMEOUT_S"] == environment(found["decode"])["BATON_DRAIN_TIMEOUT_S"]
    assert "BATON_DTYPE" not in environment(found["decode"])
    assert "gpu" not in json.dumps(found["decode"]["containers"][0]["resources"])
    deployments = of_kind(rendered(MODELS), "Deployment")
    sizes = {key: each["spec"].get("replicas") for key, each in deployments.items()}
    assert (sizes["prefill"], sizes["tuned-prefill"], sizes["large-prefill"]) == (1, 0, 2)
    assert sizes["large-tokenizer"] == 2 and sizes["large-decode"] is None
    assert deployments["large-decode"]["metadata"]["name"] == "try-baton-large-decode"
    assert environment(found["router"])["BATON_MODEL"] == "baton-tiny,Qwen/Qwen3-32B,baton-tuned"


def test_routers_find_all_models_pods_by_one_service_of_a_role_and_no_pool_has_anothers() -> None:
    objects = rendered(MODELS)
    labels = {key: each["metadata"]["labels"] for key, each in templates(objects).items()}
    for component, service in of_kind(objects, "Service").items():
        selector = service["spec"]["selector"]
        chosen = {key for key, own in labels.items() if selector.items() <= own.items()}
        assert chosen == {key for key in labels if role(key) == component}
    for kind in ("Deployment", "PodDisruptionBudget"):
        for key, each in of_kind(objects, kind).items():
            selector = each["spec"]["selector"]["matchLabels"]
            assert [one for one, own in labels.items() if selector.items() <= own.items()] == [key]
    accounts = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount").values()}
    secrets = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate").values()}
    for pod in pods(objects).values():
        if pod["containers"][0]["name"] in COMPONENTS:
            assert pod["serviceAccountName"] in accounts
            used = {v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "tls"}
            assert used and used <= secrets
    for key, policy in of_kind(objects, "NetworkPolicy").items():
        (listed,) = policy["spec"]["podSelector"].get("matchExpressions", [{"values": [key]}])
        wanted = {one for one in labels if role(one) == key}
        assert wanted <= set(listed["values"])
        assert {role(one) for one in listed["values"]} == {key}
    # Whoever fetches its model is let out to do so.
    ports = json.dumps(of_kind(objects, "NetworkPolicy")["decode"]["spec"]["egress"])
    assert '"port": 443' in ports


def test_each_model_is_scaled_by_what_routers_ask_for_it() -> None:
    (scaled,) = of_kind(rendered(MODELS), "ScaledObject").values()
    (trigger,) = scaled["spec"]["triggers"]
    assert scaled["spec"]["scaleTargetRef"]["name"] == "try-baton-large-decode"
    assert scaled["spec"]["minReplicaCount"] == 0
    assert 'role="decode",model="Qwen/Qwen3-32B"' in trigger["metadata"]["query"]
    sets = ("decode.keda.enabled=true", "models.large.decode.keda.enabled=false")
    objects = render(MODELS, sets=sets)
    found = of_kind(objects, "ScaledObject")
    query = found["decode"]["spec"]["triggers"][0]["metadata"]["query"]
    assert r'model!~"Qwen/Qwen3-32B|baton-tuned"' in query
    assert set(found) == {"decode", "tuned-decode"}, "what a model does not say, the release says"
    only = ("models.tuned.decode.autoscaling.enabled=true",)
    scaler = of_kind(render(MODELS, sets=only), "HorizontalPodAutoscaler")["tuned-decode"]
    labels = scaler["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]
    assert labels["model"] == "baton-tuned"


def test_the_planner_scales_each_model_by_itself() -> None:
    own = "models.tuned.planner.scale.decode"
    objects = render(
        MODELS,
        sets=(
            *("planner.enabled=true", "planner.externalMetrics=false"),
            *(
                "planner.scale.prefill.enabled=true",
                "models.large.planner.scale.prefill.maxReplicas=3",
            ),
            *("models.tuned.planner.scale.prefill.enabled=false",),
            *(f"{own}.enabled=true", f"{own}.minReplicas=0", f"{own}.maxReplicas=2"),
            *("planner.nodeSelector.pool=cpu", "planner.tolerations[0].operator=Exists"),
        ),
    )
    pod = pods(objects)["planner"]
    assert pod["nodeSelector"] == {"pool": "cpu"} and pod["tolerations"] == [{"operator": "Exists"}]
    given = environment(pod)
    assert given["BATON_SCALE"] == "prefill=1:10,large-prefill=1:3,tuned-decode=0:2"
    assert given["BATON_MODELS"] == "large=Qwen/Qwen3-32B,tuned=baton-tuned"
    options = configuration.load(PlannerConfig, [], given, prog="baton-planner")
    allowed = {
        name
        for rule in of_kind(objects, "Role")["planner"]["rules"]
        if rule["resources"] == ["deployments/scale"]
        for name in rule["resourceNames"]
    }
    assert allowed == {f"{options.release}-{pool}" for pool in options.pools()}
    assert allowed < {each["metadata"]["name"] for each in of_kind(objects, "Deployment").values()}


def test_claimed_gpus_take_the_place_of_a_plugins() -> None:
    objects = rendered(CHART / "ci/gpu-dra-values.yaml")
    claims = of_kind(objects, "ResourceClaimTemplate")
    for component, kind, count in (("prefill", "gpu", 2), ("decode", "mig", 1)):
        pod, claim = pods(objects)[component], claims[component]
        (named,) = pod["resourceClaims"]
        assert named["resourceClaimTemplateName"] == claim["metadata"]["name"]
        container = pod["containers"][0]
        assert container["resources"]["claims"] == [{"name": named["name"]}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert container["image"].startswith("baton-engine-gpu:")
        (request,) = claim["spec"]["spec"]["devices"]["requests"]
        assert request["exactly"]["deviceClassName"] == f"{kind}.nvidia.com"
        assert request["exactly"]["count"] == count


def test_huge_pages_are_asked_for_and_mounted() -> None:
    pod = pods(rendered(CHART / "ci/gpu-rdma-values.yaml"))["prefill"]
    container = pod["containers"][0]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["hugepages-2Mi"] == "1Gi"
    assert {"name": "hugepages", "emptyDir": {"medium": "HugePages-2Mi"}} in pod["volumes"]
    assert {"name": "hugepages", "mountPath": "/dev/hugepages"} in container["volumeMounts"]


def test_a_model_is_fetched_to_where_the_process_looks() -> None:
    """Weights for engines only; the names are those that `baton fetch` gives its folders."""
    of_hub = HubSource("Qwen/Qwen3-8B", "refs/pr/1").name
    of_volume = FolderSource(Path("/source/chart/models/llama-3")).name
    of_store = ObjectSource(URL).name
    files = (("gpu-tcp", of_hub), ("gpu-rdma", of_volume), ("aggregated", of_store))
    for name, folder in files:
        for component, pod in pods(rendered(CHART / f"ci/{name}-values.yaml")).items():
            if component in ("router", "test"):
                assert "initContainers" not in pod
                continue
            (fetch,) = pod["initContainers"]
            light = component not in ENGINES
            assert ("--tokenizer-only" in fetch["args"]) is light
            place = f"/models/{folder}" + ".tokenizer" * light
            assert environment(pod)["BATON_MODEL"] == place


def test_who_fetches_from_an_object_store_knows_it_and_is_known_to_it() -> None:
    """The init container, and the process of a pool whose adapters are there."""
    store = {"AWS_ENDPOINT_URL": "http://minio.storage:9000", "AWS_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_SESSION_TOKEN": True}
    for component, pod in pods(rendered(STORED)).items():
        fetch = pod.get("initContainers", [])
        assert len(fetch) == (component not in ("router", "test"))
        for container in (*fetch, *pod["containers"]):
            given = [e for e in container.get("env", ()) if e["name"].startswith("AWS_")]
            if container not in fetch and component != "decode":
                assert not given, "no more pods know a secret than use it"
                continue
            assert {e["name"]: e["value"] for e in given if "value" in e} == store
            secrets = [e["valueFrom"]["secretKeyRef"] for e in given if "valueFrom" in e]
            assert {s["key"]: s.get("optional") for s in secrets} == keys
            assert {s["name"] for s in secrets} == {"store"}
        if fetch:
            assert fetch[0]["args"][:4] == ["baton", "fetch", URL, "--into=/models"]
            assert environment(pod)["BATON_MODEL_NAME"] == ObjectSource(URL).served_name
            assert {"name": "models", "emptyDir": {}} in pod["volumes"]


def test_a_model_of_an_object_store_beside_one_of_a_hub() -> None:
    """Without keys, its pods are whoever their accounts are. Adapters alone need the store, too."""
    own = "models.small.model"
    sets = [f"{own}.source=s3", f"{own}.s3.uri=s3://other/small@v3", f"{own}.s3.region=eu-west-1"]
    sets += ["encode.enabled=true", "encode.model.source=s3", "encode.model.s3.uri=s3://other/bge"]
    sets += ["prefill.config.adapters_folder=s3://other/adapters", "model.s3.region=eu-west-1"]
    sets += ["networkPolicy.egress=true"]
    objects = render(CPU, sets=sets)
    found = pods(objects)
    region = {"name": "AWS_REGION", "value": "eu-west-1"}
    for component, adapters in (("prefill", True), ("small-prefill", True), ("decode", False)):
        assert (region in found[component]["containers"][0]["env"]) is adapters
        assert bool(found[component].get("initContainers")) is component.startswith("small")
    (fetch,) = found["small-decode"]["initContainers"]
    assert fetch["env"] == [region]
    assert environment(found["small-decode"])["BATON_MODEL_NAME"] == "small"
    folder = ObjectSource("s3://other/bge").name
    assert environment(found["encode"])["BATON_MODEL"] == f"/models/{folder}"
    assert found["encode"]["initContainers"][0]["args"][2] == "s3://other/bge"
    policies = of_kind(render(CPU, sets=sets[-3:]), "NetworkPolicy")
    https = {"port": 443, "protocol": "TCP"}
    for component in ("prefill", "decode", "tokenizer"):
        rules = policies[component]["spec"]["egress"]
        assert any(https in rule.get("ports", ()) for rule in rules) is (component == "prefill")


def test_everything_has_a_kind_of_each() -> None:
    kinds = {each["kind"] for each in rendered(EVERYTHING)}
    assert kinds == {
        *("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Pod"),
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject", "NetworkPolicy"),
        *(
            "ServiceMonitor",
            "PrometheusRule",
            "Certificate",
            "HTTPRoute",
            "GRPCRoute",
            "Ingress",
        ),
        *("InferencePool", "PriorityClass"),
    }


ELSEWHERE = CHART / "ci/elsewhere-values.yaml"


def test_what_other_clusters_ask_for_reaches_pods() -> None:
    found = pods(rendered(ELSEWHERE))
    engine, tokenizer, router = found["decode"], found["tokenizer"], found["router"]
    for pod in found.values():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
    assert engine["hostNetwork"] and engine["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert engine["schedulerName"] == "volcano" and engine["runtimeClassName"] == "nvidia"
    assert engine["securityContext"]["supplementalGroups"] == [44]
    (process,) = engine["containers"]
    assert process["securityContext"]["capabilities"] == {"add": ["SYS_NICE"], "drop": ["ALL"]}
    assert process["securityContext"]["readOnlyRootFilesystem"] is True
    assert engine["resourceClaims"] == [{"name": "card", "resourceClaimTemplateName": "cards"}]
    assert process["resources"]["claims"] == [{"name": "card"}]
    assert [each["name"] for each in engine["initContainers"]] == ["fetch", "tune"]
    assert [each["name"] for each in router["initContainers"]] == ["wait"]
    assert tokenizer["dnsPolicy"] == "None"
    assert tokenizer["dnsConfig"]["searches"] == ["svc.example"]
    readiness = tokenizer["containers"][0]["readinessProbe"]
    assert (readiness["timeoutSeconds"], readiness["periodSeconds"]) == (20, 2)
    test = found["test"]
    assert test["tolerations"] == [{"operator": "Exists"}]
    assert test["containers"][0]["resources"]["limits"] == {"memory": "128Mi"}


def test_a_routers_service_has_fields_of_ones_own() -> None:
    service = of_kind(rendered(ELSEWHERE), "Service")["router"]
    assert service["metadata"]["labels"]["team"] == "serving"
    assert service["spec"]["loadBalancerClass"] == "example.com/lb"
    ports = {port["name"]: port.get("nodePort") for port in service["spec"]["ports"]}
    assert ports == {"grpc": 30051, "http": None}
    assert of_kind(rendered(ELSEWHERE), "Deployment")["tokenizer"]["spec"]["strategy"] == {
        "type": "Recreate"
    }


def test_objects_of_ones_own_are_as_they_are_or_templates() -> None:
    named = [each for each in rendered(ELSEWHERE) if each["kind"] == "ConfigMap"]
    own = {each["metadata"]["name"]: each for each in named}
    assert set(own) == {"as-it-is", "try-made"}
    assert own["as-it-is"]["data"] == {"text": "{{ not a template }}"}


def test_a_claim_for_models_is_made_where_none_is_named() -> None:
    objects = rendered(ELSEWHERE)
    (claim,) = of_kind(objects, "PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    for component, pod in pods(objects).items():
        claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "models"]
        assert [each["claimName"] for each in claims] == (
            [] if component in ("router", "test") else [claim["metadata"]["name"]]
        )


def test_a_cache_that_goes_with_the_pod_asks_for_its_room() -> None:
    sets = (*GPU_SETS, "model.cache.size=20Gi")
    for component, pod in pods(render(CHART / "values-gpu-tcp.yaml", sets=sets)).items():
        if component in ("router", "test"):
            continue
        (models,) = [v for v in pod["volumes"] if v["name"] == "models"]
        assert models["emptyDir"] == {"sizeLimit": "20Gi"}
        asked = pod["initContainers"][0]["resources"]["requests"].get("ephemeral-storage")
        assert asked == ("20Gi" if component in ENGINES else None), "no weights, no room"


@every_file
def test_pods_of_one_rollout_are_spread_over_nodes_and_zones(path: Path) -> None:
    for component, template in templates(rendered(path)).items():
        constraints = template["spec"]["topologySpreadConstraints"]
        for each in constraints:
            selector = each["labelSelector"]["matchLabels"]
            assert selector.items() <= template["metadata"]["labels"].items()
        if (path.stem, component) != ("everything-values", "tokenizer"):
            keys = [each["topologyKey"] for each in constraints]
            assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
            assert {each["whenUnsatisfiable"] for each in constraints} == {"ScheduleAnyway"}


@pytest.mark.parametrize("wanted", [True, False])
def test_a_parent_chart_can_leave_it_out(tmp_path: Path, wanted: bool) -> None:
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    shutil.copytree(CHART, parent / "charts/baton")
    (parent / "Chart.yaml").write_text(
        "{apiVersion: v2, name: parent, version: 1.0.0, dependencies: "
        "[{name: baton, version: '*', condition: baton.enabled}]}"
    )
    values = {"baton": {**yaml.safe_load(CPU.read_text()), "enabled": wanted}}
    (parent / "values.yaml").write_text(yaml.safe_dump(values))
    text = helm("template", "try", str(parent))
    assert ("kind: Deployment" in text) is wanted


def test_alerts_are_the_files_about_this_release() -> None:
    """Both hold braces that helm must not take for its own."""
    (rule,) = of_kind(rendered(EVERYTHING), "PrometheusRule").values()
    text = (CHART / "files/alerts.yaml").read_text()
    own = text.replace('namespace=~".+"', 'namespace="chart",release="try"')
    assert own != text and rule["spec"] == yaml.safe_load(own)
    for monitor in of_kind(rendered(EVERYTHING), "ServiceMonitor").values():
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "try"}]
    (monitor,) = of_kind(rendered(CHART / "ci/cert-manager-values.yaml"), "PodMonitor").values()
    assert monitor["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] == "try"


def test_alerts_have_thresholds_and_addresses_of_ones_own() -> None:
    sets = (
        "alerts.thresholds.firstTokenSeconds=9",
        "alerts.thresholds.kvUse=1",
        "alerts.runbooks=https://wiki.example/baton/",
    )
    (rule,) = of_kind(render(EVERYTHING, sets=sets), "PrometheusRule").values()
    rules = {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}
    assert "> 9 # firstTokenSeconds" in rules["BatonFirstTokenSlow"]["expr"]
    assert "> 1 # kvUse" in rules["BatonDecodeKvFull"]["expr"]
    assert "> 0.05 # refusedShare" in rules["BatonRefuses"]["expr"]
    for name, one in rules.items():
        assert one["annotations"]["runbook_url"] == f"https://wiki.example/baton/{name}.md"


def test_dashboards_are_the_files_as_they_are() -> None:
    files = {f"baton-{path.name}": path for path in CHART.glob("dashboards/*.json")}
    shown = {
        name: text
        for each in of_kind(rendered(EVERYTHING), "ConfigMap").values()
        for name, text in each.get("data", {}).items()
        if name.endswith(".json")
    }
    assert len(files) >= 4 and shown.keys() == files.keys()
    for name, text in shown.items():
        assert json.loads(text) == json.loads(files[name].read_text())


@pytest.mark.parametrize(
    ("sets", "more"),
    [
        ((), ()),
        (("ingress.enabled=true", "ingress.hosts={chat.example}"), ("chat.example",)),
        (("ingress.enabled=true",), ("*",)),
        (
            (
                *("gateway.httpRoute=true", "gateway.parentRefs[0].name=g"),
                "gateway.hostnames={a.example,*.b.example}",
            ),
            ("a.example", "*.b.example"),
        ),
        (("router.config.allowed_hosts={lb.example,chart}",), ("lb.example", "chart")),
    ],
)
def test_a_router_without_keys_answers_under_its_services_and_routes_names(
    sets: tuple[str, ...], more: tuple[str, ...]
) -> None:
    found = environment(pods(render(CPU, sets=sets))["router"])
    service = "try-baton-router"
    inside = [service, *(f"{service}.chart{end}" for end in ("", ".svc", ".svc.cluster.local"))]
    assert found["BATON_ALLOWED_HOSTS"].split(",") == [*inside, *more]
    url = next(
        e["value"] for e in pods(render(CPU))["test"]["containers"][1]["env"] if e["name"] == "URL"
    )
    hosts = AllowedHosts(found["BATON_HTTP_LISTEN"], inside)
    for name in (url.removeprefix("http://"), "198.18.1.9:8000", "127.0.0.1:8000"):
        assert hosts.allow([name.encode()])


def test_nothing_optional_is_on_by_default_but_disruption_budgets() -> None:
    sets = (*("auth.allowAnonymous=true", "auth.allowAnonymousWorkers=true", "kv.network=trusted"),)
    kinds = {each["kind"] for each in render(sets=sets)}
    assert kinds == {
        *("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"),
        *("PodDisruptionBudget", "Pod"),
    }


def test_the_notes_name_a_next_command() -> None:
    text = helm(
        *("install", "try", str(CHART), "-f", str(CPU), "-n", "chart", "--dry-run=client"),
    )
    notes = text[text.index("NOTES:") :]
    assert "helm test try -n chart" in notes
    assert "port-forward service/try-baton-router" in notes


ENCODE = (
    *("encode.enabled=true", "encode.model.hub.id=some/vectors", "encode.autoscaling.enabled=true"),
    *("encode.gpu.count=1", "encode.model.cache.size=3Gi", "networkPolicy.egress=true"),
    *("tls.internal.enabled=true", "tls.internal.certManager.enabled=true"),
    "tls.internal.certManager.issuerRef.name=ca",
)


def test_encode_workers_are_a_pool_with_a_model_of_their_own() -> None:
    objects = render(CPU, sets=ENCODE)
    found = pods(objects)
    pod = found["encode"]
    given = environment(pod)
    configuration.load(generator.CONFIGS["encode"], [], given, prog="baton-encode")
    assert given["BATON_MODEL_NAME"] == "some/vectors"
    (container,), (fetch,) = pod["containers"], pod["initContainers"]
    # The chart fetches all of the model, into the folder that the process reads.
    assert fetch["args"] == ["baton", "fetch", "some/vectors", "--into=/models"]
    assert given["BATON_MODEL"] == "/models/some--vectors"
    assert fetch["resources"]["requests"]["ephemeral-storage"] == "3Gi"
    assert container["image"].startswith("baton-engine-gpu:")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    # Nothing of it is another pool's.
    assert environment(found["decode"])["BATON_MODEL_NAME"] == "baton-tiny"
    router = environment(found["router"])
    service = of_kind(objects, "Service")["encode"]
    name = service["metadata"]["name"]
    assert router["BATON_ENCODES"] == f"k8s:///{name}.chart:grpc"
    policy = of_kind(objects, "NetworkPolicy")["router"]
    selected = json.dumps(policy["spec"]["egress"])
    assert '"app.kubernetes.io/component": "encode"' in selected
    assert of_kind(objects, "HorizontalPodAutoscaler")["encode"]["spec"]["maxReplicas"] == 10
    assert of_kind(objects, "Certificate")["encode"]["spec"]["dnsNames"] == [
        "encode.baton.internal"
    ]
    assert "encode" not in pods(rendered(CPU))
