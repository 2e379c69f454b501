{{/* The claim by which a component's pods get their GPUs. Takes (dict "root" $ "component" "prefill"). */}}
{{- define "baton.resourceClaim" -}}
{{- if include "baton.claimsGpus" . -}}
{{- $gpu := (index .root.Values .component).gpu -}}
apiVersion: resource.k8s.io/{{ ternary "v1" "v1beta2" (semverCompare ">=1.34-0" .root.Capabilities.KubeVersion.Version) }}
kind: ResourceClaimTemplate
metadata:
  {{- include "baton.metadata" (merge (dict "suffix" "gpus") .) | nindent 2 }}
spec:
  spec:
    devices:
      requests:
        - name: gpus
          exactly:
            deviceClassName: {{ $gpu.dra.deviceClassName }}
            count: {{ $gpu.count }}
            {{- with $gpu.dra.selectors }}
            selectors:
              {{- range . }}
              - cel:
                  expression: {{ . | quote }}
              {{- end }}
            {{- end }}
{{- end }}
{{- end }}
