"""Wrong values are refused with a sentence that names the key: by schema, or by a template."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.k8s.charts import CHART, CPU, Refused, render

pytestmark = pytest.mark.k8s

SCHEMA: Sequence[tuple[str, str]] = [
    ("prefil.replicaCount=1", "prefil"),
    ("prefill.replicas=1", "replicas"),
    ("prefill.replicaCount=-1", "/prefill/replicaCount"),
    ("decode.replicaCount=two", "/decode/replicaCount"),
    ("decode.replicaCount=1.5", "/decode/replicaCount"),
    ("router.gpu.count=1", "gpu"),
    ("tokenizer.gpu.count=1", "gpu"),
    ("detokenizer.rdma.enabled=true", "rdma"),
    ("decode.gpu.count=-1", "/decode/gpu/count"),
    ("decode.gpu.count=one", "/decode/gpu/count"),
    ("decode.gpu.dra.enabled=perhaps", "/decode/gpu/dra/enabled"),
    ("router.hugepages.size=2Mi", "hugepages"),
    ("decode.hugepages.size=4Mi", "/decode/hugepages/size"),
    ("decode.hugepages.amount=many", "/decode/hugepages/amount"),
    ("decode.rdma.count=0", "/decode/rdma/count"),
    ("model.source=ftp", "/model/source"),
    ("model.hub.id=no-slash", "/model/hub/id"),
    ("model.s3.uri=https://models/small", "/model/s3/uri"),
    ("model.s3.uri=s3://models", "/model/s3/uri"),
    ("models.large.model.s3.uri=s3://models/small/", "/models/large/model/s3/uri"),
    ("encode.model.s3.uri=s3://models/../small", "/encode/model/s3/uri"),
    ("model.s3.endpoint=minio:9000", "/model/s3/endpoint"),
    ("model.hostPath.path=relative", "/model/hostPath/path"),
    ("model.cache.type=nfs", "/model/cache/type"),
    ("kv.network=open", "/kv/network"),
    ("network.ipFamily=IPv5", "/network/ipFamily"),
    ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
    ("decode.image.digest=latest", "/decode/image/digest"),
    ("auth.allowAnonymous=perhaps", "/auth/allowAnonymous"),
    ("prefill.config.listen=0.0.0.0:1", "listen"),
    ("prefill.config.no_such_option=1", "no_such_option"),
    ("prefill.config.dtype=float8", "/prefill/config/dtype"),
    ("prefill.config.staging_mib=-1", "/prefill/config/staging_mib"),
    ("decode.config.memory_share=2", "/decode/config/memory_share"),
    ("router.config.max_attempts=0", "/router/config/max_attempts"),
    ("router.config.playground=maybe", "/router/config/playground"),
    ("tokenizer.config.max_input_bytes=fast", "/tokenizer/config/max_input_bytes"),
    ("config.log_level=loud", "log_level"),
    ("decode.resources.limits.memory=lots", "/decode/resources/limits/memory"),
    ("decode.resources.maximum.memory=1Gi", "maximum"),
    ("decode.shm.sizeLimit=big", "/decode/shm/sizeLimit"),
    ("decode.pdb.maxUnavailable=0", "/decode/pdb/maxUnavailable"),
    ("decode.autoscaling.targetKvUse=101", "/decode/autoscaling/targetKvUse"),
    ("tokenizer.autoscaling.minReplicas=0", "/tokenizer/autoscaling/minReplicas"),
    ("router.service.type=Anycast", "/router/service/type"),
    ("decode.resources.requests.cpu=1.5x", "/decode/resources/requests/cpu"),
    ("decode.resources.claims[0].nam=card", "/decode/resources/claims/0"),
    ("decode.probes.startup.failureThreshold=9", "failureThreshold"),
    ("decode.probes.liveness.periodSeconds=0", "/decode/probes/liveness/periodSeconds"),
    ("decode.strategy.type=OnDelete", "/decode/strategy/type"),
    ("decode.dnsPolicy=Mine", "/decode/dnsPolicy"),
    ("decode.extraInitContainers[0].name=x", "/decode/extraInitContainers/0"),
    ("model.cache.accessModes={Many}", "/model/cache/accessModes/0"),
    ("router.service.nodePorts.ssh=22", "ssh"),
    ("extraObjects[0]=1", "/extraObjects/0"),
    ("models.Large.model.name=x", "Large"),
    ("models.decode.model.name=x", "decode"),
    ("models.large.decode.replicas=2", "/models/large/decode"),
    ("models.large.router.replicaCount=2", "/models/large"),
    ("models.large.model.source=ftp", "/models/large/model/source"),
    ("models.large.planner.dryRun=true", "/models/large/planner"),
    ("router.terminationGracePeriodSeconds=-1", "/router/terminationGracePeriodSeconds"),
]

SENTENCES: Sequence[tuple[str, str]] = [
    ("auth.allowAnonymous=false", "auth.keysSecret must name a Secret"),
    ("auth.keysSecret=keys", "auth.allowAnonymous contradicts auth.keysSecret"),
    ("networkPolicy.enabled=false", "auth.allowAnonymousWorkers: nothing keeps strangers"),
    (
        "networkPolicy.enabled=false,auth.allowAnonymousWorkers=true",
        "kv.network must be declared",
    ),
    ("router.replicaCount=0", "router.replicaCount must be 1 or more"),
    ("tokenizer.replicaCount=0", "tokenizer.replicaCount must be 1 or more"),
    ("decode.replicaCount=0", "decode.replicaCount must be 1 or more"),
    ("detokenizer.replicaCount=0", "detokenizer.replicaCount must be 1 or more"),
    ("model.source=hub", "model.hub.id is required"),
    ("model.source=s3", "model.s3.uri is required with model.source=s3"),
    ("model.source=pvc,model.name=m", "model.pvc.claimName is required"),
    ("model.source=image,model.name=m", "model.image.reference is required"),
    ("model.source=hostPath,model.name=m", "model.hostPath.path is required"),
    ("model.source=pvc,model.pvc.claimName=c", "model.name is required"),
    (
        "model.source=hub,model.hub.id=a/b,model.cache.type=hostPath",
        "model.cache.hostPath is required",
    ),
    (
        "model.source=hub,model.hub.id=a/b,model.cache.type=pvc",
        "model.cache.type=pvc needs model.cache.claimName, or model.cache.size",
    ),
    ("model.cache.size=1Gi", "model.cache.size is of no use with model.source=bundled"),
    (
        "model.source=hub,model.hub.id=a/b,model.cache.type=pvc,model.cache.claimName=c,"
        "model.cache.size=1Gi",
        "model.cache.size is of an emptyDir",
    ),
    ("encode.enabled=true", "encode.model.hub.id is required with encode.model.source=hub"),
    (
        "encode.enabled=true,encode.model.source=pvc,encode.model.pvc.claimName=c",
        "encode.model.name is required",
    ),
    (
        "encode.enabled=true,encode.model.hub.id=a/b,encode.model.name=baton-tiny",
        "encode.model.name is baton-tiny, as the model that chats is called",
    ),
    (
        "encode.enabled=true,encode.model.hub.id=a/b,encode.model.cache.type=pvc,"
        "encode.model.cache.size=1Gi",
        "encode.model.cache.type=pvc needs encode.model.cache.claimName.",
    ),
    (
        "encode.enabled=true,encode.model.hub.id=a/b,encode.gpu.count=2",
        "encode.gpu.count is 2: a worker computes on one GPU",
    ),
    ("enabled=false", "enabled=false is for a parent chart"),
    ("router.service.nodePorts.grpc=30051", "router.service.nodePorts needs router.service.type"),
    (
        "networkPolicy.enabled=false,networkPolicy.egress=true,"
        "auth.allowAnonymousWorkers=true,kv.network=trusted",
        "networkPolicy.enabled is false, so networkPolicy.egress",
    ),
    ("decode.hostNetwork=true,kv.network=isolated", "decode.hostNetwork: no NetworkPolicy covers"),
    ("decode.hostNetwork=true", "kv.network must be declared"),
    (
        "decode.hostNetwork=true,kv.network=isolated,tls.internal.enabled=true",
        "prefill.hostNetwork and decode.hostNetwork belong together",
    ),
    ("router.hostNetwork=true", "needs tokenizer.networkPolicy.extraIngress"),
    (
        "tokenizer.hostNetwork=true,tls.internal.enabled=true,networkPolicy.egress=true",
        "tokenizer.hostNetwork with networkPolicy.egress needs router.networkPolicy.extraEgress",
    ),
    ("model.cache.type=emptyDir", "model.cache.type is of no use with model.source=bundled"),
    (
        "decode.gpu.count=1,decode.image.repository=baton-engine-cpu",
        "decode.gpu.count is 1, but decode.image.repository is baton-engine-cpu",
    ),
    ("prefill.gpu.count=1,prefill.config.device=cpu", "but prefill.config.device is cpu"),
    ("prefill.config.device=cuda", "prefill.config.device is cuda, but prefill.gpu.count is 0"),
    ("decode.config.device=cuda:1", "decode.config.device is cuda:1, but decode.gpu.count is 0"),
    ("decode.gpu.count=4", "decode.gpu.count is 4, but decode.config makes 1 ranks"),
    (
        "decode.gpu.count=2,decode.config.tensor_parallel=4",
        "decode.gpu.count is 2, but decode.config makes 4 ranks",
    ),
    (
        "decode.gpu.count=2,decode.config.tensor_parallel=2,"
        "decode.gpu.resource=nvidia.com/mig-3g.40gb",
        "decode.gpu.count is 2, of MIG slices",
    ),
    ("decode.machines.rayAddress=head:6379", "decode.machines.rayAddress needs decode.machines"),
    (
        "decode.machines.count=2,decode.config.pipeline_parallel=2,"
        "decode.machines.rayAddress=head:6379",
        "decode.machines.rayAddress needs decode.image.repository",
    ),
    ("prefill.gpu.dra.enabled=true", "prefill.gpu.dra.enabled needs prefill.gpu.count"),
    ("decode.hugepages.size=2Mi", "decode.hugepages.size and decode.hugepages.amount belong"),
    ("decode.rdma.enabled=true,kv.network=local", "decode.rdma.enabled contradicts kv.network"),
    ("decode.terminationGracePeriodSeconds=30", "decode.terminationGracePeriodSeconds is 30"),
    ("router.terminationGracePeriodSeconds=20", "router.terminationGracePeriodSeconds is 20"),
    (
        "tokenizer.keda.enabled=true,tokenizer.autoscaling.enabled=true",
        "tokenizer.keda.enabled contradicts tokenizer.autoscaling.enabled",
    ),
    ("decode.keda.enabled=true,decode.keda.minReplicas=0", "decode.keda.minReplicas must be 1"),
    (
        "planner.enabled=true,planner.scale.decode.enabled=true,planner.scale.decode.minReplicas=0",
        "planner.scale.decode.minReplicas must be 1",
    ),
    (
        "decode.autoscaling.enabled=true,decode.autoscaling.minReplicas=11",
        "decode.autoscaling.maxReplicas is 10, less than minReplicas, which is 11",
    ),
    (
        "decode.autoscaling.enabled=true,router.config.target_first_token_ms=0",
        "decode.autoscaling.targetWorkers needs router.config.target_first_token_ms above 0",
    ),
    (
        "planner.enabled=true,planner.scale.decode.enabled=true,decode.autoscaling.enabled=true",
        "planner.scale.decode.enabled contradicts decode.autoscaling.enabled",
    ),
    (
        "planner.enabled=true,planner.externalMetrics=false",
        "planner.enabled needs something to do",
    ),
    (
        "planner.enabled=true,planner.scale.decode.enabled=true,planner.scale.decode.minReplicas=11",
        "planner.scale.decode.maxReplicas is 10, less than minReplicas, which is 11",
    ),
    (
        "router.autoscaling.enabled=true,router.autoscaling.targetCPU=0",
        "router.autoscaling.enabled needs something to scale by",
    ),
    ("tls.internal.certManager.enabled=true", "tls.internal.certManager.enabled"),
    (
        "tls.internal.enabled=true,tls.internal.certManager.enabled=true",
        "tls.internal.certManager.issuerRef.name is required",
    ),
    ("tls.public.clientCertificates=true", "tls.public.secretName is required"),
    ("gateway.httpRoute=true", "gateway.parentRefs must name a Gateway"),
    ("inferencePool.enabled=true", "inferencePool.endpointPicker.name is required"),
    ("serviceMonitor.enabled=true", "networkPolicy.monitoring must say where Prometheus is"),
    (
        "serviceMonitor.enabled=true,podMonitor.enabled=true",
        "podMonitor.enabled contradicts serviceMonitor.enabled",
    ),
    (
        "models.large.decode.replicaCount=2",
        "models.large.model.name is baton-tiny, as another model of this release is called",
    ),
    ("models.large.model.source=hub", "models.large.model.hub.id is required"),
    (
        "model.source=s3,model.s3.uri=s3://models/small,models.large.model.name=m",
        "models.large.model.s3.uri is required with models.large.model.source=s3",
    ),
    (
        "model.source=s3,model.s3.uri=s3://us/small@v1,models.large.model.s3.uri=s3://eu/small@v2",
        "models.large.model.name is small, as another model of this release is called",
    ),
    ("models.large.model.name=a\\,b", "no model's name may have a comma"),
    (
        "models.large.model.name=m,models.large.decode.replicaCount=0",
        "models.large.decode.replicaCount must be 1 or more",
    ),
    (
        "models.large.model.name=m,models.large.decode.gpu.count=4",
        "models.large.decode.gpu.count is 4, but models.large.decode.config makes 1 ranks",
    ),
    (
        "fullnameOverride=a-release-whose-name-is-of-38-letters,models.large.model.name=m,"
        "models.large.prefill.machines.count=2,models.large.prefill.machines.tokenSecret=s,"
        "models.large.prefill.config.pipeline_parallel=2",
        "fullnameOverride must be shorter: models.large.prefill.machines.count is 2",
    ),
    (
        "models.large.model.name=m,models.large.decode.terminationGracePeriodSeconds=30",
        "models.large.decode.terminationGracePeriodSeconds is 30",
    ),
    (
        "models.large.model.name=m,models.large.decode.networkPolicy.extraIngress[0].from[0].x=y",
        "models.large.decode.networkPolicy: all models share one; say it in decode.networkPolicy",
    ),
    (
        "models.large.model.name=m,models.large.sharesTokenizer=true,"
        "models.large.tokenizer.replicaCount=2",
        "models.large.sharesTokenizer: it has no tokenizer",
    ),
    (
        "models.large.model.name=a/b,models.large.decode.autoscaling.enabled=true",
        "models.large.decode.autoscaling.targetWorkers with models needs a model.name that is",
    ),
    (
        "models.large.model.name=m,prefill.keda.enabled=true,prefill.keda.targetWaitingTokens=9",
        "prefill.keda.targetWaitingTokens does not know models apart",
    ),
    (
        "models.large.model.name=m,models.large.model.source=hub,models.large.model.hub.id=a/b,"
        "models.large.model.cache.type=pvc",
        "models.large.model.cache.type=pvc needs models.large.model.cache.claimName",
    ),
    (
        "models.large.model.name=m,planner.enabled=true,models.large.decode.keda.enabled=true,"
        "models.large.planner.scale.decode.enabled=true",
        "models.large.planner.scale.decode.enabled contradicts models.large.decode.autoscaling",
    ),
    ("alerts.enabled=true", "alerts.enabled needs serviceMonitor.enabled or podMonitor.enabled"),
]


@pytest.mark.parametrize(("wrong", "key"), SCHEMA, ids=[wrong for wrong, _ in SCHEMA])
def test_the_schema_names_the_key(wrong: str, key: str) -> None:
    with pytest.raises(Refused) as refused:
        render(CPU, sets=(wrong,))
    text = refused.value.text
    assert "values don't meet the specifications" in text
    assert key in text


@pytest.mark.parametrize(("wrong", "words"), SENTENCES, ids=[wrong for wrong, _ in SENTENCES])
def test_a_template_says_what_is_wrong(wrong: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        render(CPU, sets=(wrong,))
    assert words in refused.value.text


def test_no_values_at_all_are_refused_with_what_to_say() -> None:
    with pytest.raises(Refused) as refused:
        render()
    assert "auth.keysSecret must name a Secret" in refused.value.text


def test_what_is_nearly_wrong_is_taken() -> None:
    """Prefill alone may be 0, and a file of wrong values is wrong for no other reason."""
    render(CPU, sets=("prefill.replicaCount=0",))
    render(
        CHART / "ci/cpu-values.yaml", sets=("prefill.keda.enabled=true,prefill.keda.minReplicas=0",)
    )
