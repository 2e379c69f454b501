{{/*
The Service of one component. Those of workers have no address of their own: routers connect to every pod.
Routers find pods that are not ready too: what a worker can do it says itself.
*/}}
{{- define "baton.service" -}}
{{- $c := index .root.Values .component -}}
{{- $router := eq .component "router" -}}
{{- $tls := .root.Values.tls -}}
apiVersion: v1
kind: Service
metadata:
  {{- $s := $c.service | default dict }}
  {{- include "baton.metadata" (merge (dict "annotations" $s.annotations "labels" $s.labels) .) | nindent 2 }}
spec:
  {{- if $router }}
  type: {{ $c.service.type }}
  {{- with $c.service.spec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- else }}
  clusterIP: None
  {{- end }}
  selector:
    {{- include "baton.serviceSelector" . | nindent 4 }}
  ports:
    - name: grpc
      port: 50051
      targetPort: grpc
      {{- if not (ternary (ne $tls.public.secretName "") $tls.internal.enabled $router) }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
      {{- if $router }}{{ include "baton.nodePort" $c.service.nodePorts.grpc | indent 6 }}{{ end }}
    {{- if $router }}
    - name: http
      port: 8000
      targetPort: http
      appProtocol: {{ ternary "https" "http" (ne $tls.public.secretName "") }}
      {{- include "baton.nodePort" $c.service.nodePorts.http | indent 6 }}
    {{- else }}
    {{- include "baton.metricsPort" . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "baton.nodePort" -}}
{{- if . }}
nodePort: {{ int . }}
{{- end }}
{{- end }}

{{- define "baton.metricsPort" -}}
- name: metrics
  port: 9090
  targetPort: metrics
  appProtocol: http
{{- end }}
