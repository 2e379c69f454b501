{{/* The disruption budget of one component: a node that is emptied takes its pods one by one. */}}
{{- define "baton.pdb" -}}
{{- $c := index .root.Values .component -}}
{{- if $c.pdb.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ $c.pdb.maxUnavailable }}
  {{- /* A pod that is not ready serves nobody: it may go. */}}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}
