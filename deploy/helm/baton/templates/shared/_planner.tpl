{{/* The pools that the planner scales: a list of {pool, scale, key, model}. */}}
{{- define "baton.plannerScales" -}}
{{- $found := list -}}
{{- range $key := prepend (keys .Values.models | sortAlpha) "" -}}
{{- $values := $.Values -}}
{{- with $key }}{{ $values = include "baton.models.values" (dict "root" $ "key" .) | fromYaml }}{{ end -}}
{{- range list "prefill" "decode" -}}
{{- $scale := index $values.planner.scale . -}}
{{- if $scale.enabled -}}
{{- $pool := printf "%s%s%s" $key (ternary "-" "" (ne $key "")) . -}}
{{- $found = append $found (dict "pool" $pool "scale" $scale "role" . "key" $key "model" (include "baton.model.name" (dict "Values" $values))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The same as its options take them. */}}
{{- define "baton.plannerPools" -}}
{{- $found := list -}}
{{- range include "baton.plannerScales" . | fromYamlArray -}}
{{- $found = append $found (printf "%s=%d:%d" .pool (int .scale.minReplicas) (int .scale.maxReplicas)) -}}
{{- end -}}
{{- join "," $found -}}
{{- end }}

{{- define "baton.plannerModels" -}}
{{- $found := list -}}
{{- range include "baton.plannerScales" . | fromYamlArray -}}
{{- if .key }}{{ $found = append $found (printf "%s=%s" .key .model) }}{{ end -}}
{{- end -}}
{{- join "," (uniq $found) -}}
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

{{/* Of one model's pools. Takes its root. */}}
{{- define "baton.checks.planned" -}}
{{- $v := .Values -}}
{{- range list "prefill" "decode" -}}
{{- $pool := index $v.planner.scale . -}}
{{- $c := index $v . -}}
{{- $at := include "baton.at" (dict "root" $ "component" .) -}}
{{- $key := ternary (printf "models.%s.planner.scale.%s" $.modelKey .) (printf "planner.scale.%s" .) (ne $at .) -}}
{{- if and $v.planner.enabled $pool.enabled -}}
{{- if or $c.autoscaling.enabled $c.keda.enabled -}}
{{- fail (printf "%s.enabled contradicts %s.autoscaling.enabled and %s.keda.enabled: two would fight over one pool." $key $at $at) -}}
{{- end -}}
{{- if gt (int $c.machines.count) 1 -}}
{{- fail (printf "%s.enabled: %s.machines.count is %d, and the planner scales Deployments only." $key $at (int $c.machines.count)) -}}
{{- end -}}
{{- if and (eq . "decode") (eq (int $pool.minReplicas) 0) (not $v.router.config.idle_timeout_s) -}}
{{- fail (printf "%s.minReplicas must be 1 or more without router.config.idle_timeout_s: nothing is answered without this pool, and no router would ask for it." $key) -}}
{{- end -}}
{{- if lt (int $pool.maxReplicas) (int $pool.minReplicas) -}}
{{- fail (printf "%s.maxReplicas is %d, less than minReplicas, which is %d." $key (int $pool.maxReplicas) (int $pool.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "baton.checks.planner" -}}
{{- $v := .Values -}}
{{- include "baton.checks.planned" . -}}
{{- if and $v.planner.enabled (not $v.planner.externalMetrics) (not (include "baton.plannerPools" .)) -}}
{{- fail "planner.enabled needs something to do: planner.externalMetrics, or a pool of planner.scale." -}}
{{- end -}}
{{- end }}
