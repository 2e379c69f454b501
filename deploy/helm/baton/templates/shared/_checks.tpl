{{/* What the schema cannot say: keys that depend on one another. Each refusal is a sentence that names its key. */}}
{{- define "baton.checks" -}}
{{- $v := .Values -}}
{{- if not $v.enabled -}}
{{- fail "enabled=false is for a parent chart: beside its dependency on this one it has condition: baton.enabled, and Helm then leaves all of this chart out." -}}
{{- end -}}
{{- if and $v.auth.keysSecret $v.auth.allowAnonymous -}}
{{- fail "auth.allowAnonymous contradicts auth.keysSecret: say only one of them." -}}
{{- end -}}
{{- if not (or $v.auth.keysSecret $v.auth.allowAnonymous) -}}
{{- fail "auth.keysSecret must name a Secret with a file of API keys ('baton keys new' makes one). To answer whoever reaches the router, set auth.allowAnonymous=true." -}}
{{- end -}}
{{- if not (or $v.tls.internal.enabled $v.networkPolicy.enabled $v.auth.allowAnonymousWorkers) -}}
{{- fail "auth.allowAnonymousWorkers: nothing keeps strangers from calling workers. Set tls.internal.enabled=true, or networkPolicy.enabled=true where the cluster enforces it, or auth.allowAnonymousWorkers=true if all of the pod network is trusted." -}}
{{- end -}}
{{- if not (include "baton.kvNetwork" .) -}}
{{- fail "kv.network must be declared: isolated when only Baton's workers reach the network that KV moves on (as with networkPolicy.enabled=true), trusted when everybody on it is trusted with the workers' memory, local when KV stays on its node." -}}
{{- end -}}
{{- include "baton.checks.model" (dict "root" . "at" "model") -}}
{{- include "baton.checks.encode" . -}}
{{- include "baton.checks.objects" . -}}
{{- include "baton.checks.planner" . -}}
{{- include "baton.checks.hostNetwork" . -}}
{{- include "baton.checks.pools" . -}}
{{- include "baton.checks.models" . -}}
{{- end }}

{{/* Of the pools of a root's model, and of routers. */}}
{{- define "baton.checks.pools" -}}
{{- $v := .Values -}}
{{- range list "router" "tokenizer" "decode" "detokenizer" -}}
{{- $c := index $v . -}}
{{- if and (eq (int $c.replicaCount) 0) (not $c.autoscaling.enabled) (not $c.keda.enabled) -}}
{{- fail (printf "%s.replicaCount must be 1 or more: nothing is answered without this pool. Only prefill may be 0." (include "baton.at" (dict "root" $ "component" .))) -}}
{{- end -}}
{{- end -}}
{{- range list "prefill" "decode" -}}
{{- include "baton.checks.engine" (dict "root" $ "component" . "at" (include "baton.at" (dict "root" $ "component" .))) -}}
{{- end -}}
{{- range list "router" "tokenizer" "prefill" "decode" "detokenizer" -}}
{{- include "baton.checks.scaling" (dict "root" $ "component" . "at" (include "baton.at" (dict "root" $ "component" .))) -}}
{{- end -}}
{{- end }}

{{/* Optional objects that need a name of something else. */}}
{{- define "baton.checks.objects" -}}
{{- $v := .Values -}}
{{- with $v.tls.internal.certManager -}}
{{- if and .enabled (not $v.tls.internal.enabled) -}}
{{- fail "tls.internal.certManager.enabled makes certificates that nobody would use: set tls.internal.enabled=true, too." -}}
{{- end -}}
{{- if and .enabled (not .issuerRef.name) -}}
{{- fail "tls.internal.certManager.issuerRef.name is required with tls.internal.certManager.enabled." -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.public.clientCertificates (not $v.tls.public.secretName) -}}
{{- fail "tls.public.secretName is required with tls.public.clientCertificates." -}}
{{- end -}}
{{- if and (or $v.gateway.httpRoute $v.gateway.grpcRoute) (not $v.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs must name a Gateway for gateway.httpRoute and gateway.grpcRoute." -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name is required with inferencePool.enabled: the Service of the picker." -}}
{{- end -}}
{{- if and $v.serviceMonitor.enabled $v.podMonitor.enabled -}}
{{- fail "podMonitor.enabled contradicts serviceMonitor.enabled: every number would be there twice, and sums would be double." -}}
{{- end -}}
{{- if and $v.alerts.enabled (not (or $v.serviceMonitor.enabled $v.podMonitor.enabled)) -}}
{{- fail "alerts.enabled needs serviceMonitor.enabled or podMonitor.enabled: no alert can fire of numbers that nobody reads." -}}
{{- end -}}
{{- if and (eq $v.router.service.type "ClusterIP") (or $v.router.service.nodePorts.grpc $v.router.service.nodePorts.http) -}}
{{- fail "router.service.nodePorts needs router.service.type NodePort or LoadBalancer." -}}
{{- end -}}
{{- if and (not $v.networkPolicy.enabled) (or $v.networkPolicy.egress $v.networkPolicy.clients $v.networkPolicy.monitoring) -}}
{{- fail "networkPolicy.enabled is false, so networkPolicy.egress, clients and monitoring would keep nobody out: set it, or leave them empty." -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (or $v.serviceMonitor.enabled $v.podMonitor.enabled) (not $v.networkPolicy.monitoring) -}}
{{- fail "networkPolicy.monitoring must say where Prometheus is: with networkPolicy.enabled nobody else reads metrics." -}}
{{- end -}}
{{- end }}

{{/* Takes (dict "root" ROOT "at" KEY): the model of that root's values, and the key that a user knows it by. */}}
{{- define "baton.checks.model" -}}
{{- $m := .root.Values.model -}}
{{- $needed := dict "hub" "id" "s3" "uri" "pvc" "claimName" "image" "reference" "hostPath" "path" -}}
{{- with get $needed $m.source -}}
{{- if not (index $m $m.source .) -}}
{{- fail (printf "%s.%s.%s is required with %s.source=%s." $.at $m.source . $.at $m.source) -}}
{{- end -}}
{{- end -}}
{{- if not (include "baton.model.name" .root) -}}
{{- fail (printf "%s.name is required with %s.source=%s: it is what clients call the model." .at .at $m.source) -}}
{{- end -}}
{{- if and (eq $m.cache.type "hostPath") (not $m.cache.hostPath) -}}
{{- fail (printf "%s.cache.hostPath is required with %s.cache.type=hostPath: a folder of each node." .at .at) -}}
{{- end -}}
{{- if and (eq $m.cache.type "pvc") (not (or $m.cache.claimName .claim (and $m.cache.size (eq .at "model")))) -}}
{{- fail (printf "%s.cache.type=pvc needs %s.cache.claimName%s." .at .at (ternary ", or model.cache.size of the one that the chart then makes" "" (eq .at "model"))) -}}
{{- end -}}
{{- if and $m.cache.size (not (include "baton.model.fetched" .root)) -}}
{{- fail (printf "%s.cache.size is of no use with %s.source=%s: nothing is fetched. Set %s.cache.type, too." .at .at $m.source .at) -}}
{{- end -}}
{{- if and $m.cache.size (or (eq $m.cache.type "hostPath") $m.cache.claimName) -}}
{{- fail (printf "%s.cache.size is of an emptyDir, or of a claim that the chart makes: a folder of the node or a claim of your own has its size." .at) -}}
{{- end -}}
{{- if and $m.cache.type (eq $m.source "bundled") -}}
{{- fail (printf "%s.cache.type is of no use with %s.source=bundled: that model is in every image." .at .at) -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.encode" -}}
{{- $e := .Values.encode -}}
{{- if $e.enabled -}}
{{- $values := include "baton.encode.values" . | fromYaml -}}
{{- include "baton.checks.model" (dict "root" (dict "Values" $values "Release" .Release) "at" "encode.model") -}}
{{- if eq (include "baton.model.name" (dict "Values" $values)) (include "baton.model.name" .) -}}
{{- fail (printf "encode.model.name is %s, as the model that chats is called: clients could not tell them apart." (include "baton.model.name" .)) -}}
{{- end -}}
{{- if and $e.gpu.count (contains "engine-cpu" $e.image.repository) -}}
{{- fail (printf "encode.gpu.count is %d, but encode.image.repository is %s, which cannot use a GPU. Leave the repository empty, or name one with CUDA." (int $e.gpu.count) $e.image.repository) -}}
{{- end -}}
{{- if gt (int $e.gpu.count) 1 -}}
{{- fail (printf "encode.gpu.count is %d: a worker computes on one GPU. Have more pods." (int $e.gpu.count)) -}}
{{- end -}}
{{- include "baton.checks.scaling" (dict "root" $ "component" "encode" "at" "encode") -}}
{{- end -}}
{{- end }}

{{/* A NetworkPolicy selects no pod in its node's network, and lets none in. */}}
{{- define "baton.checks.hostNetwork" -}}
{{- $v := .Values -}}
{{- if $v.networkPolicy.enabled -}}
{{- range concat (list "tokenizer" "prefill" "decode" "detokenizer") (ternary (list "encode") list $v.encode.enabled) -}}
{{- $at := include "baton.at" (dict "root" $ "component" .) -}}
{{- if and (index $v .).hostNetwork (not (or $v.tls.internal.enabled $v.auth.allowAnonymousWorkers)) -}}
{{- fail (printf "%s.hostNetwork: no NetworkPolicy covers a pod in its node's network, so nothing keeps strangers from it. Set tls.internal.enabled=true, or auth.allowAnonymousWorkers=true if all of that network is trusted." $at) -}}
{{- end -}}
{{- if and (index $v .).hostNetwork $v.networkPolicy.egress (not $v.router.networkPolicy.extraEgress) -}}
{{- fail (printf "%s.hostNetwork with networkPolicy.egress needs router.networkPolicy.extraEgress with the nodes' addresses: no policy can name a pod in its node's network." $at) -}}
{{- end -}}
{{- if and $v.router.hostNetwork (not (index $v .).hostNetwork) (not (index $v .).networkPolicy.extraIngress) -}}
{{- fail (printf "router.hostNetwork with networkPolicy.enabled needs %s.networkPolicy.extraIngress with the nodes' addresses: its policy cannot tell a router in its node's network from others there." .) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $v.prefill.hostNetwork $v.decode.hostNetwork) (gt (int $v.prefill.replicaCount) 0) -}}
{{- fail "prefill.hostNetwork and decode.hostNetwork belong together with networkPolicy.enabled: the policy of one cannot let in pods of the node's network, so no KV would move." -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.engine" -}}
{{- $c := index .root.Values .component -}}
{{- if and $c.gpu.count (contains "engine-cpu" (include "baton.repository" .)) -}}
{{- fail (printf "%s.gpu.count is %d, but %s.image.repository is %s, which cannot use a GPU. Leave the repository empty, or name one with CUDA." .at (int $c.gpu.count) .at $c.image.repository) -}}
{{- end -}}
{{- $machines := int $c.machines.count -}}
{{- $stages := int ($c.config.pipeline_parallel | default 1) -}}
{{- if mod $stages $machines -}}
{{- fail (printf "%s.machines.count is %d, but %s.config.pipeline_parallel is %d: machines share out stages, and each has as many." .at $machines .at $stages) -}}
{{- end -}}
{{- if and $c.machines.rayAddress (eq $machines 1) -}}
{{- fail (printf "%s.machines.rayAddress needs %s.machines.count above 1: Ray places the other machines of a worker." .at .at) -}}
{{- end -}}
{{- if and $c.machines.rayAddress (not $c.image.repository) -}}
{{- fail (printf "%s.machines.rayAddress needs %s.image.repository: an image of yours with Ray in it, for Baton's own have none." .at .at) -}}
{{- end -}}
{{- if and (gt $machines 1) (not $c.machines.tokenSecret) (not $c.machines.rayAddress) -}}
{{- fail (printf "%s.machines.count is %d, which needs %s.machines.tokenSecret: a Secret whose entry token is what a group's machines show each other, 16 characters or more; or %s.machines.rayAddress." .at $machines .at .at) -}}
{{- end -}}
{{- /* A StatefulSet of each group has its number behind the name, and the hash of a revision behind that, as a label. */ -}}
{{- $name := include "baton.componentName" . -}}
{{- if and (gt $machines 1) (gt (len $name) 49) -}}
{{- fail (printf "fullnameOverride must be shorter: %s.machines.count is %d, and the groups of %s could get no pods, whose labels take 63 characters: 49 for this name, which has %d." .at $machines $name (len $name)) -}}
{{- end -}}
{{- $ranks := div (mul ($c.config.tensor_parallel | default 1) $stages) $machines | int -}}
{{- if and $c.gpu.count (ne (int $c.gpu.count) $ranks) -}}
{{- fail (printf "%s.gpu.count is %d, but %s.config makes %d ranks of a machine (tensor_parallel x pipeline_parallel / machines.count): each computes on one GPU." .at (int $c.gpu.count) .at $ranks) -}}
{{- end -}}
{{- if and (gt (int $c.gpu.count) 1) (or (contains "/mig-" $c.gpu.resource) (and $c.gpu.dra.enabled (hasPrefix "mig." $c.gpu.dra.deviceClassName))) -}}
{{- fail (printf "%s.gpu.count is %d, of MIG slices: ranks cannot add up their results between slices. Have one slice a pod, and more pods." .at (int $c.gpu.count)) -}}
{{- end -}}
{{- if and $c.gpu.dra.enabled (not $c.gpu.count) -}}
{{- fail (printf "%s.gpu.dra.enabled needs %s.gpu.count: how many devices to claim." .at .at) -}}
{{- end -}}
{{- if and $c.gpu.dra.enabled (semverCompare "<1.33-0" .root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.gpu.dra.enabled takes Kubernetes 1.33 or newer, and this is %s." .at .root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if ne (empty $c.hugepages.size) (empty $c.hugepages.amount) -}}
{{- fail (printf "%s.hugepages.size and %s.hugepages.amount belong together: say both, or neither." .at .at) -}}
{{- end -}}
{{- if and $c.gpu.count (eq ($c.config.device | default "auto") "cpu") -}}
{{- fail (printf "%s.gpu.count is %d, but %s.config.device is cpu: the GPU would idle." .at (int $c.gpu.count) .at) -}}
{{- end -}}
{{- if and (not $c.gpu.count) (not (has ($c.config.device | default "auto") (list "auto" "cpu"))) -}}
{{- fail (printf "%s.config.device is %s, but %s.gpu.count is 0." .at $c.config.device .at) -}}
{{- end -}}
{{- if and $c.rdma.enabled (eq (include "baton.kvNetwork" .root) "local") -}}
{{- fail (printf "%s.rdma.enabled contradicts kv.network=local: KV would stay on its node." .at) -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.scaling" -}}
{{- $c := index .root.Values .component -}}
{{- if and $c.autoscaling.enabled $c.keda.enabled -}}
{{- fail (printf "%s.keda.enabled contradicts %s.autoscaling.enabled: two autoscalers would fight over one pool." .at .at) -}}
{{- end -}}
{{- if and .root.Values.models $c.keda.enabled $c.keda.targetWaitingTokens -}}
{{- fail (printf "%s.keda.targetWaitingTokens does not know models apart, as what waits in routers counts for all: with models, use targetWorkers." .at) -}}
{{- end -}}
{{- if and .root.Values.models $c.autoscaling.enabled $c.autoscaling.targetWorkers (not (regexMatch "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" (include "baton.model.name" .root))) -}}
{{- fail (printf "%s.autoscaling.targetWorkers with models needs a model.name that is a label's value, which %s is not: up to 63 letters, digits, dots, dashes and underscores. Or use keda, or planner.scale." .at (include "baton.model.name" .root)) -}}
{{- end -}}
{{- if and $c.keda.enabled (eq (int $c.keda.minReplicas) 0) (ne .component "prefill") (not (and (eq .component "decode") .root.Values.router.config.idle_timeout_s)) -}}
{{- fail (printf "%s.keda.minReplicas must be 1 or more: nothing is answered without this pool. Only prefill may be 0, and decode with router.config.idle_timeout_s." .at) -}}
{{- end -}}
{{- range list "autoscaling" "keda" -}}
{{- $s := index $c . -}}
{{- if and $s.enabled (lt (int $s.maxReplicas) (int $s.minReplicas)) -}}
{{- fail (printf "%s.%s.maxReplicas is %d, less than minReplicas, which is %d." $.at . (int $s.maxReplicas) (int $s.minReplicas)) -}}
{{- end -}}
{{- if and $s.enabled (not (or $s.targetCPU $s.targetWorkers $s.targetWaitingTokens $s.targetKvUse $s.metrics $s.triggers)) -}}
{{- fail (printf "%s.%s.enabled needs something to scale by: no target is above 0, and no metric of your own is given." $.at .) -}}
{{- end -}}
{{- if and $s.enabled $s.targetWorkers (hasKey $.root.Values.router.config "target_first_token_ms") (not $.root.Values.router.config.target_first_token_ms) -}}
{{- fail (printf "%s.%s.targetWorkers needs router.config.target_first_token_ms above 0: with 0 routers ask for no number of workers." $.at .) -}}
{{- end -}}
{{- end -}}
{{- end }}
