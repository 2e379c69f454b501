{{/* Keeps releases of one namespace apart, in alerts and dashboards. */}}
{{- define "baton.relabelings" -}}
relabelings:
  - {targetLabel: release, replacement: {{ .Release.Name }}}
{{- end }}

{{/* How Prometheus' operator finds metrics: of one component by its Service, or of all pods at once. */}}
{{- define "baton.servicemonitor" -}}
{{- $s := .root.Values.serviceMonitor -}}
{{- if $s.enabled -}}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  {{- include "baton.metadata" (merge (dict "labels" $s.labels) .) | nindent 2 }}
spec:
  selector:
    matchLabels:
      {{- include "baton.selectorLabels" . | nindent 6 }}
  namespaceSelector:
    matchNames: [{{ .root.Release.Namespace }}]
  endpoints:
    - port: metrics
      interval: {{ $s.interval }}
      {{- include "baton.relabelings" .root | nindent 6 }}
{{- end }}
{{- end }}
