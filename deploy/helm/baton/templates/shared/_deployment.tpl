{{/* The Deployment of one component. Takes (dict "root" $ "component" "prefill"). */}}
{{- define "baton.deployment" -}}
{{- $c := index .root.Values .component -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  {{- with include "baton.replicas" . }}
  replicas: {{ . }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- /* A pool that loads a large model is not stuck because it takes its time. */}}
  progressDeadlineSeconds: {{ add $c.startupTimeoutSeconds 60 }}
  strategy:
    {{- toYaml $c.strategy | nindent 4 }}
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" . | nindent 6 }}
  template:
    {{- include "baton.pod" . | nindent 4 }}
{{- end }}

{{/*
How many pods to ask for; empty: whoever scaled the pool has said so. The API server knows who set a field last. When it
was `kubectl scale` or an autoscaler, an upgrade that says another number is refused, and one that says nothing leaves
the pool as it is. A pool that is about to get its autoscaler is told the number it has: to say nothing then would take
back what was said, which means one pod. Where nothing can be looked up, as in `helm template`, replicaCount counts.
*/}}
{{- define "baton.replicas" -}}
{{- $c := index .root.Values .component -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace (include "baton.componentName" .) -}}
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
