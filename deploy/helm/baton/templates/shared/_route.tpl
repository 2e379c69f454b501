{{/* A route of the Gateway API to the router. Takes "kind", "port" and "hostnames" besides. */}}
{{- define "baton.route" -}}
apiVersion: gateway.networking.k8s.io/v1
kind: {{ .kind }}
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  parentRefs:
    {{- toYaml .root.Values.gateway.parentRefs | nindent 4 }}
  {{- with .hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - backendRefs:
        - name: {{ include "baton.componentName" . }}
          port: {{ .port }}
{{- end }}
