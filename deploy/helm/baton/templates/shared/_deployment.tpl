{{/*
What makes the pods of one component. Takes (dict "root" $ "component" "prefill"). A Deployment; where a worker is on
several machines, a LeaderWorkerSet, whose replicas are groups of pods: the first one is the worker, the others have
ranks. A group is made again as a whole when one of its pods ends.
*/}}
{{- define "baton.poolKind" -}}
{{- if include "baton.isGroup" . }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else }}
apiVersion: apps/v1
kind: Deployment
{{- end }}
{{- end }}

{{- define "baton.deployment" -}}
{{- $c := index .root.Values .component -}}
{{ include "baton.poolKind" . | trim }}
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  {{- with include "baton.replicas" . }}
  replicas: {{ . }}
  {{- end }}
  {{- if include "baton.isGroup" . }}
  startupPolicy: LeaderCreated
  {{- /* A group has nodes of its own: a new one finds none before an old one has left. */}}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
  {{- /* Its controller makes a headless Service of each group, for the leader's name. One of the set's own name is the
  chart's, by which routers find workers. */}}
  networkConfig:
    subdomainPolicy: UniquePerReplica
  leaderWorkerTemplate:
    size: {{ int $c.machines.count }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "baton.pod" . | nindent 6 }}
    workerTemplate:
      {{- include "baton.pod" (merge (dict "ranks" true) .) | nindent 6 }}
  {{- else }}
  revisionHistoryLimit: 3
  {{- /* A pool that loads a large model is not stuck because it takes its time. */}}
  progressDeadlineSeconds: {{ add $c.startupTimeoutSeconds 60 }}
  strategy:
    {{- toYaml (eq $c.strategy.type "Recreate" | ternary (dict "type" "Recreate") $c.strategy) | nindent 4 }}
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" . | nindent 6 }}
  template:
    {{- include "baton.pod" . | nindent 4 }}
  {{- end }}
{{- end }}

{{/*
How many pods to ask for; empty: whoever scaled the pool has said so. The API server knows who set a field last. When it
was `kubectl scale` or an autoscaler, an upgrade that says another number is refused, and one that says nothing leaves
the pool as it is. A pool that is about to get its autoscaler is told the number it has: to say nothing then would take
back what was said, which means one pod. Where nothing can be looked up, as in `helm template`, replicaCount counts.
*/}}
{{- define "baton.replicas" -}}
{{- $c := index .root.Values .component -}}
{{- $kind := include "baton.poolKind" . | fromYaml -}}
{{- $live := lookup $kind.apiVersion $kind.kind .root.Release.Namespace (include "baton.componentName" .) -}}
{{- $autoscaler := or $c.autoscaling.enabled $c.keda.enabled -}}
{{- $ours := false -}}
{{- $applied := false -}}
{{- range (($live.metadata).managedFields) -}}
{{- if not .subresource -}}
{{- if hasKey (index .fieldsV1 "f:spec" | default dict) "f:replicas" }}{{ $ours = true }}{{ end -}}
{{- if eq .operation "Apply" }}{{ $applied = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not $live -}}
{{- if not $autoscaler }}{{ int $c.replicaCount }}{{ end -}}
{{- else if and $ours (not $autoscaler) -}}
{{- int $c.replicaCount -}}
{{- else if and (not $ours) (not (or $autoscaler .root.Values.keepScaled)) -}}
{{- int $c.replicaCount -}}
{{- /* Helm 3 compares what it said with what it says: to it, too, silence would mean one pod. */ -}}
{{- else if or $ours (not $applied) -}}
{{- int $live.spec.replicas -}}
{{- end -}}
{{- end }}
