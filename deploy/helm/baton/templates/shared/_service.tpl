{{/*
The Service of one component. Those of workers have no address of their own: routers connect to every pod.
Routers find pods that are not ready too: what a worker can do it says itself.
*/}}
{{- define "baton.service" -}}
{{- $c := index .root.Values .component -}}
{{- $router := eq .component "router" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "baton.metadata" (merge (dict "annotations" ($c.service | default dict).annotations) .) | nindent 2 }}
spec:
  {{- if $router }}
  type: {{ $c.service.type }}
  {{- else }}
  clusterIP: None
  {{- end }}
  selector:
    {{- include "baton.selectorLabels" . | nindent 4 }}
  ports:
    - name: grpc
      port: 50051
      targetPort: grpc
      appProtocol: kubernetes.io/h2c
    {{- if $router }}
    - name: http
      port: 8000
      targetPort: http
      appProtocol: http
    {{- end }}
    - name: metrics
      port: 9090
      targetPort: metrics
      appProtocol: http
{{- end }}
