{{/* Where a model comes from, and how its folder gets into a pod. Takes the root, or a component's dict. */}}

{{- define "baton.model.folder" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "bundled" -}}{{ $m.bundled.path }}
{{- else if eq $m.source "hub" -}}/models/{{ $m.hub.id | replace "/" "--" }}
{{- else if eq $m.source "pvc" -}}{{ printf "/models/%s" $m.pvc.path }}
{{- else if eq $m.source "image" -}}{{ printf "/models/%s" $m.image.path }}
{{- else if eq $m.source "hostPath" -}}/models
{{- end }}
{{- end }}

{{- define "baton.model.path" -}}
{{ include "baton.model.folder" . | trimSuffix "/" }}
{{- end }}

{{/* The name that clients use. */}}
{{- define "baton.model.name" -}}
{{- $m := .Values.model -}}
{{- if $m.name }}{{ $m.name }}
{{- else if eq $m.source "bundled" }}{{ base $m.bundled.path }}
{{- else if eq $m.source "hub" }}{{ $m.hub.id }}
{{- end }}
{{- end }}

{{/* Whether an init container brings the model. */}}
{{- define "baton.model.fetched" -}}
{{- if eq .Values.model.source "hub" }}true{{ end }}
{{- end }}

{{- define "baton.model.volumes" -}}
{{- $m := .Values.model -}}
{{- if ne $m.source "bundled" }}
- name: models
{{- if eq $m.source "hub" }}
  {{- if eq $m.cache.type "hostPath" }}
  hostPath:
    path: {{ $m.cache.hostPath }}
    type: DirectoryOrCreate
  {{- else if eq $m.cache.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $m.cache.claimName }}
  {{- else }}
  emptyDir:
    {{- with $m.cache.sizeLimit }}
    sizeLimit: {{ . }}
    {{- else }} {}
    {{- end }}
  {{- end }}
{{- else if eq $m.source "pvc" }}
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
{{- end }}

{{- define "baton.model.mounts" -}}
{{- if ne .Values.model.source "bundled" }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{/* Brings a model of the hub, once per cache: who comes second waits, and finds it there. */}}
{{- define "baton.model.init" -}}
{{- $m := .root.Values.model -}}
{{- if include "baton.model.fetched" .root }}
- name: fetch
  image: {{ include "baton.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [baton, fetch, {{ $m.hub.id | quote }}, --into, {{ include "baton.model.path" .root | quote }}]
  env:
    {{- with $m.hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- if $m.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $m.hub.tokenSecret }}
          key: {{ $m.hub.tokenSecretKey }}
    {{- end }}
    {{- with $m.hub.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml $m.hub.resources | nindent 4 }}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: models
      mountPath: /models
{{- end }}
{{- end }}
