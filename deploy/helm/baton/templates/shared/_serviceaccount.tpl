{{/* The account of one component. Only a router is given its token: it alone speaks to the API. */}}
{{- define "baton.serviceaccount" -}}
{{- $c := index .root.Values .component -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "baton.metadata" (merge (dict "annotations" $c.serviceAccount.annotations) .) | nindent 2 }}
automountServiceAccountToken: false
{{- end }}
