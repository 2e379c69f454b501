{{/* Names, labels and images. Partials of one component take (dict "root" $ "component" "prefill"). */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short enough that "-detokenizer" and the hash of a ReplicaSet fit behind it. */}}
{{- define "baton.fullname" -}}
{{- $name := include "baton.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What the objects of a component are called; a pool of one of `models` has the model's key before its role. */}}
{{- define "baton.componentName" -}}
{{ include "baton.fullname" .root }}{{ with include "baton.modelKey" . }}-{{ . }}{{ end }}{{ with .component }}-{{ . }}{{ end }}
{{- end }}

{{/* The same for what all models share: the account and the certificate of a role. */}}
{{- define "baton.roleName" -}}
{{ include "baton.componentName" (dict "root" (omit .root "modelKey") "component" .component) }}
{{- end }}

{{/* What never changes of a component: selectors are immutable. */}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ with include "baton.modelKey" $ }}{{ . }}-{{ end }}{{ . }}
{{- end }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The metadata of every object. Without a component it is the release's; it may take "suffix", "labels",
"annotations" and "clusterScoped" besides. */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.componentName" . }}{{ with .suffix }}-{{ . }}{{ end }}
{{- if not .clusterScoped }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- toYaml (merge (dict) (include "baton.labels" . | fromYaml) (.labels | default dict)) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* True for the pools that run the model. */}}
{{- define "baton.isEngine" -}}
{{- if has .component (list "prefill" "decode") }}true{{ end }}
{{- end }}

{{/* True for the pools that read weights. */}}
{{- define "baton.hasWeights" -}}
{{- if or (include "baton.isEngine" .) (eq .component "encode") }}true{{ end }}
{{- end }}

{{/* The root as the encode pool sees it: its model instead of the one that chats. */}}
{{- define "baton.encode.values" -}}
{{- toYaml (set (omit .Values "model") "model" .Values.encode.model) }}
{{- end }}

{{/* One object of the encode pool, where there is one. Takes (dict "root" $ "part" "deployment"). */}}
{{- define "baton.encode" -}}
{{- if .root.Values.encode.enabled -}}
{{- $values := include "baton.encode.values" .root | fromYaml -}}
{{- include (printf "baton.%s" .part) (dict "root" (merge (dict "Values" $values) (omit .root "Values")) "component" "encode") }}
{{- end -}}
{{- end }}

{{- define "baton.repository" -}}
{{- $c := index .root.Values .component }}
{{- if $c.image.repository }}
{{- $c.image.repository }}
{{- else if not (include "baton.hasWeights" .) }}
{{- "baton-cpu" }}
{{- else if $c.gpu.count }}
{{- "baton-engine-gpu" }}
{{- else }}
{{- "baton-engine-cpu" }}
{{- end }}
{{- end }}

{{- define "baton.image" -}}
{{- $c := index .root.Values .component }}
{{- $image := .root.Values.image }}
{{- with $image.registry }}{{ . | trimSuffix "/" }}/{{ end }}
{{- include "baton.repository" . }}
{{- if $c.image.digest }}@{{ $c.image.digest }}
{{- else }}:{{ $c.image.tag | default $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* A value as a process's environment takes it. Helm reads all numbers as floats. */}}
{{- define "baton.text" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}
{{- else }}{{ . }}{{ end }}
{{- end }}

{{/* The gRPC service whose health is a component's readiness. */}}
{{- define "baton.grpcService" -}}
baton.v1.{{ if eq .component "router" }}Inference{{ else }}{{ title .component }}{{ end }}
{{- end }}
