{{/* Configuration as environment: every key of `config` is a field of the process's dataclass. */}}

{{/* All of an interface, in the pods' family of addresses. */}}
{{- define "baton.any" -}}
{{ if eq .Values.network.ipFamily "IPv6" }}[::]{{ else }}0.0.0.0{{ end }}
{{- end }}

{{- define "baton.pool" -}}
k8s:///{{ include "baton.componentName" . }}.{{ .root.Release.Namespace }}:grpc
{{- end }}

{{/* What the chart itself decides. A map, as YAML. */}}
{{- define "baton.ownConfig" -}}
{{- $v := .root.Values -}}
{{- $any := include "baton.any" .root -}}
health_listen: "{{ $any }}:50052"
metrics_listen: "{{ $any }}:9090"
{{- if $v.tls.internal.enabled }}
tls_cert: /etc/baton/tls/tls.crt
tls_key: /etc/baton/tls/tls.key
tls_ca: /etc/baton/tls/ca.crt
{{- end }}
{{- if eq .component "router" }}
grpc_listen: "{{ $any }}:50051"
http_listen: "{{ $any }}:8000"
tokenizers: {{ include "baton.pool" (dict "root" .root "component" "tokenizer") }}
prefills: {{ include "baton.pool" (dict "root" .root "component" "prefill") }}
decodes: {{ include "baton.pool" (dict "root" .root "component" "decode") }}
detokenizers: {{ include "baton.pool" (dict "root" .root "component" "detokenizer") }}
{{- if $v.encode.enabled }}
encodes: {{ include "baton.pool" (dict "root" .root "component" "encode") }}
{{- end }}
routers: {{ include "baton.pool" . }}
{{- if or $v.models $v.router.config.idle_timeout_s $v.router.config.model_aliases }}
model:
  {{- include "baton.models.names" .root | nindent 2 }}
{{- end }}
{{- if $v.auth.keysSecret }}
keys: /etc/baton/keys/{{ $v.auth.keysSecretKey }}
{{- else }}
allow_anonymous: true
allowed_hosts:
  {{- include "baton.allowedHosts" . | nindent 2 }}
{{- end }}
{{- if $v.tls.public.secretName }}
public_tls_cert: /etc/baton/public-tls/tls.crt
public_tls_key: /etc/baton/public-tls/tls.key
{{- if $v.tls.public.clientCertificates }}
public_tls_ca: /etc/baton/public-tls/ca.crt
{{- end }}
{{- end }}
{{- if $v.tls.public.terminated }}
tls_terminated: true
{{- end }}
{{- else }}
listen: "{{ $any }}:50051"
advertise: {{ if eq $v.network.ipFamily "IPv6" }}"[$(POD_IP)]:50051"{{ else }}"$(POD_IP):50051"{{ end }}
model: {{ include "baton.model.path" . }}
model_name: {{ include "baton.model.name" .root }}
{{- if not $v.tls.internal.enabled }}
allow_anonymous: true
{{- end }}
{{- if include "baton.isEngine" . }}
kv_network: {{ include "baton.kvNetwork" .root }}
{{- end }}
{{- if include "baton.isSpread" . }}
machines: {{ int (index .root.Values .component).machines.count }}
ranks_listen: {{ if eq $v.network.ipFamily "IPv6" }}"[$(POD_IP)]:{{ include "baton.ranksPort" . }}"{{ else }}"$(POD_IP):{{ include "baton.ranksPort" . }}"{{ end }}
{{- with (index .root.Values .component).machines.rayAddress }}
ray_address: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
The names under which a router without keys answers over HTTP, as a list: those of its Service, of its Ingress and
of its route, and router.config.allowed_hosts. An Ingress or a route without names is for every name. Addresses of pods
and Services, port-forwards and probes need no entry.
*/}}
{{- define "baton.allowedHosts" -}}
{{- $v := .root.Values -}}
{{- $service := include "baton.componentName" . -}}
{{- $inside := printf "%s.%s" $service .root.Release.Namespace -}}
{{- $hosts := list $service $inside (printf "%s.svc" $inside) (printf "%s.svc.cluster.local" $inside) -}}
{{- if $v.ingress.enabled }}{{ $hosts = concat $hosts ($v.ingress.hosts | default (list "*")) }}{{ end -}}
{{- if $v.gateway.httpRoute }}{{ $hosts = concat $hosts ($v.gateway.hostnames | default (list "*")) }}{{ end -}}
{{- toYaml (concat $hosts ($v.router.config.allowed_hosts | default list) | uniq) }}
{{- end }}

{{/* Declared, or what a NetworkPolicy makes of it. */}}
{{- define "baton.kvNetwork" -}}
{{- $covered := and .Values.networkPolicy.enabled (not (or .Values.prefill.hostNetwork .Values.decode.hostNetwork)) }}
{{- .Values.kv.network | default (ternary "isolated" "" $covered) }}
{{- end }}

{{/* A component's whole configuration as YAML: its own `config` over the common one. */}}
{{- define "baton.config" -}}
{{- $c := index .root.Values .component -}}
{{- toYaml (mergeOverwrite (dict) .root.Values.config $c.config (include "baton.ownConfig" . | fromYaml)) }}
{{- end }}

{{- define "baton.env" -}}
{{- $c := index .root.Values .component -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- range $key, $value := include "baton.config" . | fromYaml }}
- name: BATON_{{ upper $key }}
  value: {{ include "baton.text" $value | quote }}
{{- end }}
{{- if include "baton.isGroup" . }}
{{ include "baton.ranksToken" . }}
{{- end }}
{{- if include "baton.fetchesAdapters" . }}
{{- include "baton.model.store" .root }}
{{- end }}
{{- with $c.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.ranksToken" -}}
- name: BATON_RANKS_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ (index .root.Values .component).machines.tokenSecret }}
      key: token
{{- end }}

{{/* Of a pod of ranks. The set's controller says who its leader is, and which machine it is itself. */}}
{{- define "baton.ranksEnv" -}}
{{- $c := index .root.Values .component -}}
- name: BATON_LEADER
  value: ":{{ include "baton.ranksPort" . }}"
{{ include "baton.ranksToken" . }}
{{- $config := include "baton.config" . | fromYaml }}
{{- range list "device" "log_level" "log_json" }}
{{- if hasKey $config . }}
- name: BATON_{{ upper . }}
  value: {{ include "baton.text" (index $config .) | quote }}
{{- end }}
{{- end }}
{{- with $c.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
