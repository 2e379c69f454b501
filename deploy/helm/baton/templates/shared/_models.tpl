{{/*
The models of a release: the one that `model` says, and those of `models`, each of which has tokenizer, prefill, decode and
detokenizer pools of its own. What it does not say of them, the release's own pools say. Partials see a model of `models`
by a root of its own, whose Values have the model's in place of the release's and which has the model's key as
"modelKey". Of each role there is one Service, account, certificate, policy and monitor for all models.
*/}}

{{- define "baton.models.pools" -}}
[tokenizer, prefill, decode, detokenizer]
{{- end }}

{{/* True for the components that each model has its own of. */}}
{{- define "baton.isModels" -}}
{{- if has (.component | default "" | trimSuffix "-ranks") (include "baton.models.pools" . | fromYamlArray) }}true{{ end }}
{{- end }}

{{/* Of the model of `models` that a component belongs to; empty: it is the release's. */}}
{{- define "baton.modelKey" -}}
{{- if include "baton.isModels" . }}{{ .root.modelKey | default "" }}{{ end }}
{{- end }}

{{/* How a user calls a component in values. */}}
{{- define "baton.at" -}}
{{ with include "baton.modelKey" . }}models.{{ . }}.{{ end }}{{ .component }}
{{- end }}

{{/* The Values of one model's root. Takes (dict "root" $ "key" KEY). What tells models apart is never another one's. */}}
{{- define "baton.models.values" -}}
{{- $v := .root.Values -}}
{{- $own := index $v.models .key | default dict -}}
{{- $values := omit $v "model" -}}
{{- $nothing := dict "name" "" "hub" (dict "id" "" "revision" "") "s3" (dict "uri" "") "pvc" (dict "path" "") "image" (dict "reference" "" "path" "") "hostPath" (dict "path" "") -}}
{{- if ne (($own.model).source | default $v.model.source) $v.model.source -}}
{{- $_ := set $nothing "cache" (dict "type" "" "hostPath" "" "claimName" "" "size" "") -}}
{{- end -}}
{{- $_ := set $values "model" (mergeOverwrite (deepCopy $v.model) $nothing ($own.model | default dict)) -}}
{{- range append (include "baton.models.pools" . | fromYamlArray) "planner" -}}
{{- $_ := set $values . (mergeOverwrite (deepCopy (index $v .)) (index $own . | default dict)) -}}
{{- end -}}
{{- $_ := set $values "sharesTokenizer" ($own.sharesTokenizer | default false) -}}
{{- toYaml $values }}
{{- end }}

{{/* The names of all models that chat, first the release's own, as a list. Takes the root. */}}
{{- define "baton.models.names" -}}
{{- $names := list (include "baton.model.name" .) -}}
{{- range $key := keys .Values.models | sortAlpha -}}
{{- $values := include "baton.models.values" (dict "root" $ "key" $key) | fromYaml -}}
{{- $names = append $names (include "baton.model.name" (dict "Values" $values)) -}}
{{- end -}}
{{- toYaml $names }}
{{- end }}

{{/* Whether something holds of a component of any model. Takes "asked", the partial that says it of one, besides. */}}
{{- define "baton.ofAnyModel" -}}
{{- $it := . -}}
{{- $found := include .asked (dict "root" .root "component" .component) -}}
{{- if include "baton.isModels" . -}}
{{- range $key := keys .root.Values.models -}}
{{- $values := include "baton.models.values" (dict "root" $it.root "key" $key) | fromYaml -}}
{{- $root := merge (dict "Values" $values "modelKey" $key) (omit $it.root "Values") -}}
{{- $found = printf "%s%s" $found (include $it.asked (dict "root" $root "component" $it.component)) -}}
{{- end -}}
{{- end -}}
{{- if $found }}true{{ end }}
{{- end }}

{{/* Selects the pods of a role, of all models. */}}
{{- define "baton.selector" -}}
{{- $found := list .component -}}
{{- if include "baton.isModels" . -}}
{{- range $key := keys .root.Values.models | sortAlpha }}{{ $found = append $found (printf "%s-%s" $key $.component) }}{{ end -}}
{{- end -}}
matchLabels:
  {{- include "baton.selectorLabels" (dict "root" .root "component" (ternary .component "" (eq (len $found) 1))) | nindent 2 }}
{{- if gt (len $found) 1 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ toJson $found }}}
{{- end }}
{{- end }}

{{/* The same for a Service, which selects by equal labels only. */}}
{{- define "baton.serviceSelector" -}}
{{- if and .root.Values.models (include "baton.isModels" .) -}}
{{ include "baton.selectorLabels" (dict "root" .root) }}
baton.internal/role: {{ .component }}
{{- else -}}
{{ include "baton.selectorLabels" . }}
{{- end }}
{{- end }}

{{- define "baton.checks.models" -}}
{{- $v := .Values -}}
{{- $names := ternary (list (include "baton.model.name" (dict "Values" (include "baton.encode.values" . | fromYaml)))) list $v.encode.enabled -}}
{{- $names = concat $names (list (include "baton.model.name" .)) ($v.router.config.model_aliases | default list) -}}
{{- $claim := and (include "baton.model.fetched" .) (eq $v.model.cache.type "pvc") (not $v.model.cache.claimName) -}}
{{- range $key := keys $v.models | sortAlpha -}}
{{- $at := printf "models.%s" $key -}}
{{- $own := index $v.models $key | default dict -}}
{{- $values := include "baton.models.values" (dict "root" $ "key" $key) | fromYaml -}}
{{- $root := merge (dict "Values" $values "modelKey" $key) (omit $ "Values") -}}
{{- include "baton.checks.model" (dict "root" $root "at" (printf "%s.model" $at) "claim" $claim) -}}
{{- $name := include "baton.model.name" $root -}}
{{- if has $name $names -}}
{{- fail (printf "%s.model.name is %s, as another model of this release is called: clients could not tell them apart." $at $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- range $pool := include "baton.models.pools" $ | fromYamlArray -}}
{{- $said := index $own $pool | default dict -}}
{{- range $shared := list "serviceAccount" "networkPolicy" -}}
{{- if hasKey $said $shared -}}
{{- fail (printf "%s.%s.%s: all models share one; say it in %s.%s." $at $pool $shared $pool $shared) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $own.sharesTokenizer (or $own.tokenizer $own.detokenizer) -}}
{{- fail (printf "%s.sharesTokenizer: it has no tokenizer and detokenizer of its own, so nothing can be said of them." $at) -}}
{{- end -}}
{{- include "baton.checks.pools" $root -}}
{{- include "baton.checks.planned" $root -}}
{{- include "baton.checks.hostNetwork" $root -}}
{{- end -}}
{{- if and $v.models (contains "," (join "" $names)) -}}
{{- fail "models: no model's name may have a comma, for routers take a list of names." -}}
{{- end -}}
{{- end }}
