{{/*
What a pool is scaled by. CPU for what computes on CPUs; for the pools that run the model the number of workers that
routers ask for (core/routing/scaling.py). A user may have plain signals besides or instead, of which the one that asks
for most counts: prompt tokens that wait for prefill, the share of decode's KV blocks in use. An HPA takes the number
from external.metrics.k8s.io, which the planner or an adapter serves, and plain signals from an adapter that serves
them as metrics of pods; KEDA asks Prometheus.
*/}}

{{- define "baton.hpa" -}}
{{- $c := index .root.Values .component -}}
{{- $a := $c.autoscaling -}}
{{- if $a.enabled -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- include "baton.poolKind" . | trim | nindent 4 }}
    name: {{ include "baton.componentName" . }}
  minReplicas: {{ $a.minReplicas }}
  maxReplicas: {{ $a.maxReplicas }}
  metrics:
    {{- with $a.targetCPU }}
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ . }}
    {{- end }}
    {{- if $a.targetWorkers }}
    - type: External
      external:
        metric:
          name: baton_pool_target_workers
          selector:
            matchLabels:
              role: {{ .component }}
              service: {{ include "baton.routerMetrics" . }}
              {{- if .root.Values.models }}
              model: {{ include "baton.model.name" .root | quote }}
              {{- end }}
        target:
          type: AverageValue
          averageValue: "1"
    {{- end }}
    {{- with $a.targetWaitingTokens }}
    - type: Pods
      pods:
        metric:
          name: baton_waiting_tokens
        target:
          type: AverageValue
          averageValue: {{ include "baton.text" . | quote }}
    {{- end }}
    {{- with $a.targetKvUse }}
    - type: Pods
      pods:
        metric:
          name: {{ include "baton.kvUseMetric" $ }}
        target:
          type: AverageValue
          averageValue: {{ printf "%dm" (mul . 10) }}
    {{- end }}
    {{- with $a.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $a.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What Prometheus' operator calls the routers of this release: the Service by which it finds them. */}}
{{- define "baton.routerMetrics" -}}
{{ include "baton.componentName" (dict "root" .root "component" "router") }}-metrics
{{- end }}

{{- define "baton.kvUseMetric" -}}
vllm:kv_cache_usage_perc
{{- end }}

{{/* The series of this component's pods. */}}
{{- define "baton.series" -}}
{namespace="{{ .root.Release.Namespace }}",pod=~"{{ include "baton.componentName" . }}-.*"}
{{- end }}

{{/* What tells the series of a component's model from those of others, in PromQL: the release's own pools are for whatever
no other model is called, as while another model takes the place of the release's. */}}
{{- define "baton.ofModel" -}}
{{- if .root.modelKey -}}
,model={{ include "baton.model.name" .root | quote }}
{{- else if .root.Values.models -}}
{{- $others := list -}}
{{- range rest (include "baton.models.names" .root | fromYamlArray) }}{{ $others = append $others (regexQuoteMeta .) }}{{ end -}}
,model!~{{ join "|" $others | quote }}
{{- end }}
{{- end }}

{{/* One trigger of KEDA: takes "query" and "threshold", which a pod's share is held against. */}}
{{- define "baton.prometheusTrigger" -}}
- type: prometheus
  metricType: AverageValue
  metadata:
    serverAddress: {{ .root.Values.keda.prometheusAddress }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | quote }}
{{- end }}

{{- define "baton.scaledobject" -}}
{{- $c := index .root.Values .component -}}
{{- $k := $c.keda -}}
{{- if $k.enabled -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- if include "baton.isGroup" . }}
    {{- include "baton.poolKind" . | trim | nindent 4 }}
    {{- end }}
    name: {{ include "baton.componentName" . }}
  minReplicaCount: {{ $k.minReplicas }}
  maxReplicaCount: {{ $k.maxReplicas }}
  triggers:
    {{- with $k.targetCPU }}
    - type: cpu
      metricType: Utilization
      metadata:
        value: {{ . | toString | quote }}
    {{- end }}
    {{- if $k.targetWorkers }}
    {{- /* Each router speaks for all of them; while one model takes another's place, both have workers. */}}
    {{- $series := include "baton.series" (dict "root" $.root "component" "router") | trimSuffix "}" }}
    {{- $asked := printf "sum(max by (model) (baton_pool_target_workers%s,role=\"%s\"%s}))" $series $.component (include "baton.ofModel" $) }}
    {{- include "baton.prometheusTrigger" (dict "root" $.root "query" $asked "threshold" "1") | nindent 4 }}
    {{- end }}
    {{- with $k.targetWaitingTokens }}
    {{- /* What waits in routers counts, too: it is all there is while no pod runs. */}}
    {{- $queued := printf "sum(baton_queued_tokens%s)" (include "baton.series" (dict "root" $.root "component" "router")) }}
    {{- $waiting := printf "(sum(baton_waiting_tokens%s) or vector(0))" (include "baton.series" $) }}
    {{- include "baton.prometheusTrigger" (dict "root" $.root "query" (printf "%s + %s" $queued $waiting) "threshold" (include "baton.text" .)) | nindent 4 }}
    {{- end }}
    {{- with $k.targetKvUse }}
    {{- $use := printf "sum(%s%s)" (include "baton.kvUseMetric" $) (include "baton.series" $) }}
    {{- include "baton.prometheusTrigger" (dict "root" $.root "query" $use "threshold" (divf . 100 | toString)) | nindent 4 }}
    {{- end }}
    {{- with $k.triggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
