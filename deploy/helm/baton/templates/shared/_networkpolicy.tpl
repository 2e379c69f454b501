{{/*
Who may talk to whom. Clients call the router, the router calls workers, engines read one another's KV: over UCX, which
listens on ports of its own choice. A network policy does not see RDMA. Probes come from the node, which is let in.
*/}}

{{- define "baton.peer" -}}
- podSelector:
    {{- include "baton.selector" . | nindent 4 }}
{{- end }}

{{- define "baton.engines" -}}
{{ include "baton.peer" (dict "root" .root "component" "prefill") }}
{{ include "baton.peer" (dict "root" .root "component" "decode") }}
{{- end }}

{{- define "baton.networkpolicy" -}}
{{- $c := index .root.Values .component -}}
{{- $n := .root.Values.networkPolicy -}}
{{- if $n.enabled -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  podSelector:
    {{- include "baton.selector" . | nindent 4 }}
  policyTypes: [Ingress{{ if $n.egress }}, Egress{{ end }}]
  ingress:
    {{- if eq .component "router" }}
    - ports:
        - port: grpc
        - port: http
      {{- with $n.clients }}
      from:
        {{- toYaml . | nindent 8 }}
        {{- include "baton.peer" (dict "root" $.root "component" "test") | nindent 8 }}
      {{- end }}
    {{- else }}
    - ports:
        - port: grpc
      from:
        {{- include "baton.peer" (dict "root" .root "component" "router") | nindent 8 }}
    {{- end }}
    {{- if include "baton.isEngine" . }}
    - from:
        {{- include "baton.engines" . | nindent 8 }}
    {{- end }}
    {{- if include "baton.ofAnyModel" (merge (dict "asked" "baton.isGroup") .) }}
    - from:
        {{- include "baton.peer" (dict "root" .root "component" (printf "%s-ranks" .component)) | nindent 8 }}
    {{- end }}
    {{- with $n.monitoring }}
    - ports:
        - port: metrics
      from:
        {{- toYaml . | nindent 8 }}
    {{- end }}
    {{- if and (eq .component "router") .root.Values.planner.enabled }}
    - ports:
        - port: metrics
      from:
        {{- include "baton.peer" (dict "root" .root "component" "planner") | nindent 8 }}
    {{- end }}
    {{- with $c.networkPolicy.extraIngress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if $n.egress }}
  egress:
    {{- include "baton.egress" . | trim | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Of the pods with a component's other ranks: they and their leaders reach each other, at ports that gloo and NCCL choose
and that ask nobody who they are. Which group a pod is of, no policy can say.
*/}}
{{- define "baton.ranksNetworkpolicy" -}}
{{- $n := .root.Values.networkPolicy -}}
{{- if and $n.enabled (include "baton.ofAnyModel" (merge (dict "asked" "baton.isGroup") .)) }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "baton.metadata" (merge (dict "suffix" "ranks") .) | nindent 2 }}
spec:
  podSelector:
    {{- include "baton.selector" (dict "root" .root "component" (printf "%s-ranks" .component)) | nindent 4 }}
  policyTypes: [Ingress{{ if $n.egress }}, Egress{{ end }}]
  ingress:
    - from:
        {{- include "baton.groupPeers" . | nindent 8 }}
  {{- if $n.egress }}
  egress:
    - to:
        {{- include "baton.groupPeers" . | nindent 8 }}
    {{- /* The leader's name; and whoever fetches the model. */}}
    - ports:
        - {port: 53, protocol: UDP}
        - {port: 53, protocol: TCP}
        {{- if include "baton.ofAnyModel" (merge (dict "asked" "baton.fetches") .) }}
        - {port: 443, protocol: TCP}
        {{- end }}
    {{- with (index .root.Values .component).networkPolicy.extraEgress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.groupPeers" -}}
{{ include "baton.peer" . }}
{{ include "baton.peer" (dict "root" .root "component" (printf "%s-ranks" .component)) }}
{{- end }}

{{/* A list, never empty: nothing is written as a rule for the pod's own kind of peer. */}}
{{- define "baton.egress" -}}
{{- $c := index .root.Values .component -}}
{{- if eq .component "router" -}}
{{- /* Names, and the API server, whose address no policy can know. */}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    - {port: 443, protocol: TCP}
    - {port: 6443, protocol: TCP}
- ports:
    - port: 50051
  to:
    {{- range concat (list "tokenizer" "prefill" "decode" "detokenizer") (ternary (list "encode") list .root.Values.encode.enabled) }}
    {{- include "baton.peer" (dict "root" $.root "component" .) | nindent 4 }}
    {{- end }}
{{- else if include "baton.isEngine" . -}}
- to:
    {{- include "baton.engines" . | nindent 4 }}
    {{- if include "baton.ofAnyModel" (merge (dict "asked" "baton.isGroup") .) }}
    {{- include "baton.peer" (dict "root" .root "component" (printf "%s-ranks" .component)) | nindent 4 }}
    {{- end }}
{{- end }}
{{- $fetches := include "baton.ofAnyModel" (merge (dict "asked" "baton.fetches") .) }}
{{- if $fetches }}
{{- /* Whoever fetches the model, or adapters. */}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    - {port: 443, protocol: TCP}
{{- end }}
{{- with $c.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- if and (has .component (list "tokenizer" "detokenizer" "encode")) (not $fetches) (not $c.networkPolicy.extraEgress) }}
[]
{{- end }}
{{- end }}
