{{/*
How long a pod may take to leave, from the configuration of its process: nothing is killed that is about to end
well. Kubernetes counts the preStop sleep, too.
*/}}
{{- define "baton.leaving" -}}
{{- $c := index .root.Values .component -}}
{{- $config := include "baton.config" . | fromYaml -}}
{{- $s := addf $c.preStopSeconds $config.drain_timeout_s 10 -}}
{{- if and (eq .component "router") $config.lame_duck_s -}}
{{- /* It is waited for connections to get old. */ -}}
{{- $s = addf $s $config.lame_duck_s (mulf 1.1 $config.connection_max_age_s) -}}
{{- end -}}
{{- ceil $s -}}
{{- end }}

{{- define "baton.grace" -}}
{{- $c := index .root.Values .component -}}
{{- $needed := include "baton.leaving" . | int -}}
{{- $given := int $c.terminationGracePeriodSeconds -}}
{{- if and $given (lt $given $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but leaving takes up to %d s with this configuration: preStop, drain and a margin of 10 s. Give at least that, or 0 for as much as is needed." (include "baton.at" .) $given $needed) -}}
{{- end -}}
{{- default $needed $given -}}
{{- end }}
