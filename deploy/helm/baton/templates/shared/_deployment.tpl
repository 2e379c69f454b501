{{/* The Deployment of one component. Takes (dict "root" $ "component" "prefill"). */}}
{{- define "baton.deployment" -}}
{{- $c := index .root.Values .component -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  {{- if not (or $c.autoscaling.enabled $c.keda.enabled) }}
  replicas: {{ $c.replicaCount }}
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
