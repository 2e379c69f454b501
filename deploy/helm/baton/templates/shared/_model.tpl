{{/*
Where a model comes from, and how its folder gets into a pod. Takes (dict "root" $ "component" "prefill").

A model of a hub or an object store is fetched into a cache by an init container; one on a volume is, too, where a cache
is asked for, as it should be when the volume is slower than the node's own disk. Tokenizer and detokenizer fetch no
weights.
*/}}

{{/* Whether it comes over the network, and not from a volume or the image. */}}
{{- define "baton.model.remote" -}}
{{- if has .Values.model.source (list "hub" "s3") }}true{{ end }}
{{- end }}

{{- define "baton.model.fetched" -}}
{{- $m := .Values.model -}}
{{- if or (include "baton.model.remote" .) (and (ne $m.source "bundled") $m.cache.type) }}true{{ end }}
{{- end }}

{{/* Whether a component's processes themselves fetch adapters, as requests and operators name them. */}}
{{- define "baton.fetchesAdapters" -}}
{{- if hasPrefix "s3://" ((index .root.Values .component).config.adapters_folder | default "") }}true{{ end }}
{{- end }}

{{/* Whether a component's pods fetch their model, or adapters. */}}
{{- define "baton.fetches" -}}
{{- if ne .component "router" }}{{ include "baton.model.fetched" .root }}{{ include "baton.fetchesAdapters" . }}{{ end }}
{{- end }}

{{/* The model's folder on its own volume, below where that is mounted. */}}
{{- define "baton.model.below" -}}
{{- $m := .Values.model -}}
{{- with (index $m $m.source).path }}{{ if ne $m.source "hostPath" }}/{{ trimAll "/" . }}{{ end }}{{ end }}
{{- end }}

{{/* Where the volume is mounted for `baton fetch`, which names its copy by the folder's path: no two volumes that pods
share a cache of have one path. */}}
{{- define "baton.model.mounted" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "hostPath" }}/source/{{ trimAll "/" $m.hostPath.path }}
{{- else if eq $m.source "pvc" }}/source/{{ .Release.Namespace }}/{{ $m.pvc.claimName }}
{{- else }}/source/{{ $m.image.reference | sha256sum | trunc 12 }}/{{ $m.image.reference | base | replace ":" "-" | replace "@" "-" }}
{{- end }}
{{- end }}

{{/* What `baton fetch` is told. */}}
{{- define "baton.model.origin" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "hub" }}{{ $m.hub.id }}
{{- else if eq $m.source "s3" }}{{ $m.s3.uri }}
{{- else }}{{ include "baton.model.mounted" . }}{{ include "baton.model.below" . }}
{{- end }}
{{- end }}

{{/* Where the process finds it; in a cache under the name that `baton fetch` gives it. */}}
{{- define "baton.model.path" -}}
{{- $m := .root.Values.model -}}
{{- if eq $m.source "bundled" }}{{ $m.bundled.path }}
{{- else if not (include "baton.model.fetched" .root) }}/models{{ include "baton.model.below" .root }}
{{- else -}}
{{- if eq $m.source "hub" }}/models/{{ $m.hub.id | replace "/" "--" }}{{ with $m.hub.revision }}@{{ . | replace "%" "%25" | replace "/" "%2F" }}{{ end }}
{{- else }}
{{- $origin := include "baton.model.origin" .root }}/models/{{ base $origin }}-{{ $origin | sha256sum | trunc 12 }}
{{- end }}
{{- if not (include "baton.hasWeights" .) }}.tokenizer{{ end }}
{{- end }}
{{- end }}

{{/* The name that clients use. Takes the root. */}}
{{- define "baton.model.name" -}}
{{- $m := .Values.model -}}
{{- if $m.name }}{{ $m.name }}
{{- else if eq $m.source "bundled" }}{{ base $m.bundled.path }}
{{- else if eq $m.source "hub" }}{{ $m.hub.id }}
{{- else if eq $m.source "s3" }}{{ base $m.s3.uri | splitList "@" | first }}
{{- end }}
{{- end }}

{{/* The volume that the model is on. */}}
{{- define "baton.model.sourceVolume" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "pvc" }}
persistentVolumeClaim:
  claimName: {{ $m.pvc.claimName }}
  readOnly: true
{{- else if eq $m.source "image" }}
image:
  reference: {{ $m.image.reference }}
  pullPolicy: {{ $m.image.pullPolicy }}
{{- else if eq $m.source "hostPath" }}
hostPath:
  path: {{ $m.hostPath.path }}
  type: Directory
{{- end }}
{{- end }}

{{- define "baton.model.cacheVolume" -}}
{{- $cache := .Values.model.cache -}}
{{- if eq $cache.type "hostPath" }}
hostPath:
  path: {{ $cache.hostPath }}
  type: Directory
{{- else if eq $cache.type "pvc" }}
persistentVolumeClaim:
  claimName: {{ $cache.claimName | default (printf "%s-models" (include "baton.fullname" .)) }}
{{- else }}
emptyDir:
  {{- with $cache.size }}
  sizeLimit: {{ . }}
  {{- else }} {}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.model.volumes" -}}
{{- $fetched := include "baton.model.fetched" .root -}}
{{- if ne .root.Values.model.source "bundled" }}
- name: models
  {{- include (ternary "baton.model.cacheVolume" "baton.model.sourceVolume" (ne $fetched "")) .root | trim | nindent 2 }}
{{- if and $fetched (not (include "baton.model.remote" .root)) }}
- name: source
  {{- include "baton.model.sourceVolume" .root | trim | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.model.mounts" -}}
{{- if ne .root.Values.model.source "bundled" }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.model.env" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "hub" }}
{{- with $m.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with $m.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $m.hub.tokenSecretKey }}
{{- end }}
{{- else if eq $m.source "s3" }}
{{- include "baton.model.store" . }}
{{- end }}
{{- with $m.cache.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Which object store it is, and who reads it, for the model or for adapters. */}}
{{- define "baton.model.store" -}}
{{- $s3 := .Values.model.s3 -}}
{{- with $s3.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with $s3.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with $s3.credentialsSecret }}
{{- range $key := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" }}
- name: {{ $key }}
  valueFrom:
    secretKeyRef:
      name: {{ $s3.credentialsSecret }}
      key: {{ $key }}
      {{- if eq $key "AWS_SESSION_TOKEN" }}
      optional: true
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.model.init" -}}
{{- $m := .root.Values.model -}}
{{- if include "baton.model.fetched" .root }}
- name: fetch
  image: {{ include "baton.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - baton
    - fetch
    - {{ include "baton.model.origin" .root | quote }}
    - --into=/models
    {{- if not (include "baton.hasWeights" .) }}
    - --tokenizer-only
    {{- end }}
    {{- if and (eq $m.source "hub") $m.hub.revision }}
    - {{ printf "--revision=%s" $m.hub.revision | quote }}
    {{- end }}
  {{- with include "baton.model.env" .root | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  {{- $resources := deepCopy $m.cache.resources }}
  {{- if and $m.cache.size (include "baton.hasWeights" .) (has $m.cache.type (list "" "emptyDir")) }}
  {{- $resources = merge $resources (dict "requests" (dict "ephemeral-storage" $m.cache.size)) }}
  {{- end }}
  resources:
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: models
      mountPath: /models
    {{- if not (include "baton.model.remote" .root) }}
    - name: source
      mountPath: {{ include "baton.model.mounted" .root }}
      readOnly: true
    {{- end }}
{{- end }}
{{- end }}
