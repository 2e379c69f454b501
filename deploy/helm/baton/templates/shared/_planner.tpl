{{/* The pools that the planner scales, as its option takes them. */}}
{{- define "baton.plannerPools" -}}
{{- $found := list -}}
{{- range list "prefill" "decode" -}}
{{- $pool := index $.Values.planner.scale . -}}
{{- if $pool.enabled }}{{ $found = append $found (printf "%s=%d:%d" . (int $pool.minReplicas) (int $pool.maxReplicas)) }}{{ end -}}
{{- end -}}
{{- join "," $found -}}
{{- end }}

{{/*
The certificate by which the API server knows the planner: {cert, key}, each in base64. The one that is there stays;
where nothing can be looked up, as in `helm template`, each rendering makes another one.
*/}}
{{- define "baton.plannerCertificate" -}}
{{- $name := include "baton.componentName" (dict "root" . "component" "planner") -}}
{{- $live := lookup "v1" "Secret" .Release.Namespace $name -}}
{{- if $live -}}
{{- dict "cert" (index $live.data "tls.crt") "key" (index $live.data "tls.key") | toYaml -}}
{{- else if .Values.plannerMade -}}
{{- .Values.plannerMade | toYaml -}}
{{- else -}}
{{- $host := printf "%s.%s.svc" $name .Release.Namespace -}}
{{- $made := genSelfSignedCert $host nil (list $host) 3650 -}}
{{- /* One for all templates of a rendering. */ -}}
{{- $_ := set .Values "plannerMade" (dict "cert" ($made.Cert | b64enc) "key" ($made.Key | b64enc)) -}}
{{- .Values.plannerMade | toYaml -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.planner" -}}
{{- $v := .Values -}}
{{- range list "prefill" "decode" -}}
{{- $pool := index $v.planner.scale . -}}
{{- $c := index $v . -}}
{{- if and $v.planner.enabled $pool.enabled -}}
{{- if or $c.autoscaling.enabled $c.keda.enabled -}}
{{- fail (printf "planner.scale.%s.enabled contradicts %s.autoscaling.enabled and %s.keda.enabled: two would fight over one pool." . . .) -}}
{{- end -}}
{{- if gt (int $c.machines.count) 1 -}}
{{- fail (printf "planner.scale.%s.enabled: %s.machines.count is %d, and the planner scales Deployments only." . . (int $c.machines.count)) -}}
{{- end -}}
{{- if and (eq . "decode") (eq (int $pool.minReplicas) 0) (not $v.router.config.idle_timeout_s) -}}
{{- fail "planner.scale.decode.minReplicas must be 1 or more without router.config.idle_timeout_s: nothing is answered without this pool, and no router would ask for it." -}}
{{- end -}}
{{- if lt (int $pool.maxReplicas) (int $pool.minReplicas) -}}
{{- fail (printf "planner.scale.%s.maxReplicas is %d, less than minReplicas, which is %d." . (int $pool.maxReplicas) (int $pool.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.planner.enabled (not $v.planner.externalMetrics) (not (include "baton.plannerPools" .)) -}}
{{- fail "planner.enabled needs something to do: planner.externalMetrics, or a pool of planner.scale." -}}
{{- end -}}
{{- end }}
