{{/*
The pod of one component, template and all: the one place where pods are described.
Takes (dict "root" $ "component" "prefill"), and "ranks" true for a pod of another machine's ranks, which serves nobody
but its leader: no Service selects it, and no probe asks it, for it ends with its leader.
*/}}

{{- define "baton.podSecurity" -}}
{{- $c := index .root.Values .component -}}
{{- $own := dict "runAsNonRoot" true "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if .root.Values.fixedUser }}{{ $own = merge $own (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532) }}{{ end -}}
{{- toYaml (mergeOverwrite $own (deepCopy ($c.podSecurityContext | default dict))) }}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* restricted pod security, but for RDMA: pinning memory takes a capability. */}}
{{- define "baton.processSecurity" -}}
{{- $c := index .root.Values .component -}}
{{- $own := include "baton.containerSecurity" . | fromYaml -}}
{{- if and (include "baton.isEngine" .) $c.rdma.enabled $c.rdma.ipcLock -}}
{{- $_ := set $own.capabilities "add" (list "IPC_LOCK") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $own (deepCopy $c.securityContext)) }}
{{- end }}

{{/* The process's own resources, and the pool's devices, which are limits and requests alike. */}}
{{- define "baton.resources" -}}
{{- $c := index .root.Values .component -}}
{{- $r := deepCopy $c.resources -}}
{{- if include "baton.hasWeights" . -}}
{{- $devices := dict -}}
{{- if and $c.gpu.count (not (include "baton.claimsGpus" .)) }}{{ $_ := set $devices $c.gpu.resource $c.gpu.count }}{{ end -}}
{{- with ($c.hugepages).size }}{{ $_ := set $devices (printf "hugepages-%s" .) $c.hugepages.amount }}{{ end -}}
{{- if ($c.rdma).enabled }}{{ $_ := set $devices $c.rdma.resource $c.rdma.count }}{{ end -}}
{{- if $devices -}}
{{- $r = mergeOverwrite $r (dict "limits" $devices) (dict "requests" $devices) -}}
{{- end -}}
{{- if include "baton.claimsGpus" . }}{{ $_ := set $r "claims" (append ($r.claims | default list) (dict "name" "gpus")) }}{{ end -}}
{{- end -}}
{{- toYaml $r }}
{{- end }}

{{/* Whether a component's GPUs come by dynamic resource allocation. */}}
{{- define "baton.claimsGpus" -}}
{{- $c := index .root.Values .component -}}
{{- if and (include "baton.isEngine" .) $c.gpu.count $c.gpu.dra.enabled }}true{{ end }}
{{- end }}

{{/*
startup: has it finished loading? readiness: does it take work now? liveness: does it answer at all? The port
speaks health in plain text and nothing else, so TLS changes nothing.

A pod that leaves is no endpoint any more, whatever its probes say. So readiness has patience: on a node without
enough CPU every pod answers late, and a Service that then takes all of them out refuses everybody.
*/}}
{{- define "baton.probes" -}}
{{- $c := index .root.Values .component -}}
startupProbe:
  grpc:
    port: 50052
    service: startup
  {{- toYaml $c.probes.startup | nindent 2 }}
  failureThreshold: {{ ceil (divf $c.startupTimeoutSeconds ($c.probes.startup.periodSeconds | default 10)) }}
readinessProbe:
  grpc:
    port: 50052
    service: {{ include "baton.grpcService" . }}
  {{- toYaml $c.probes.readiness | nindent 2 }}
livenessProbe:
  grpc:
    port: 50052
  {{- toYaml $c.probes.liveness | nindent 2 }}
{{- end }}

{{- define "baton.ports" -}}
- name: grpc
  containerPort: 50051
{{- if eq .component "router" }}
- name: http
  containerPort: 8000
{{- end }}
- name: health
  containerPort: 50052
- name: metrics
  containerPort: 9090
{{- if include "baton.isSpread" . }}
- name: ranks
  containerPort: {{ include "baton.ranksPort" . }}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- $c := index .root.Values .component -}}
{{- $v := .root.Values -}}
- name: tmp
  emptyDir: {}
{{- if include "baton.isEngine" . }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $c.shm.sizeLimit }}
{{- with $c.hugepages.size }}
- name: hugepages
  emptyDir:
    medium: HugePages-{{ . }}
{{- end }}
{{- end }}
{{- if ne .component "router" }}
{{- include "baton.model.volumes" . }}
{{- end }}
{{- if $v.tls.internal.enabled }}
- name: tls
  secret:
    secretName: {{ include "baton.tlsSecret" . }}
{{- end }}
{{- if eq .component "router" }}
{{- with $v.auth.keysSecret }}
- name: keys
  secret:
    secretName: {{ . }}
{{- end }}
{{- with $v.tls.public.secretName }}
- name: public-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}
{{- with $c.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
{{- $c := index .root.Values .component -}}
{{- $v := .root.Values -}}
- name: tmp
  mountPath: /tmp
{{- if include "baton.isEngine" . }}
- name: shm
  mountPath: /dev/shm
{{- if $c.hugepages.size }}
- name: hugepages
  mountPath: /dev/hugepages
{{- end }}
{{- end }}
{{- if ne .component "router" }}
{{- include "baton.model.mounts" . }}
{{- end }}
{{- if $v.tls.internal.enabled }}
- name: tls
  mountPath: /etc/baton/tls
  readOnly: true
{{- end }}
{{- if eq .component "router" }}
{{- if $v.auth.keysSecret }}
- name: keys
  mountPath: /etc/baton/keys
  readOnly: true
{{- end }}
{{- if $v.tls.public.secretName }}
- name: public-tls
  mountPath: /etc/baton/public-tls
  readOnly: true
{{- end }}
{{- end }}
{{- with $c.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.initContainers" -}}
{{- if ne .component "router" }}{{ include "baton.model.init" . }}{{ end }}
{{- with (index .root.Values .component).extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.tlsSecret" -}}
{{- index .root.Values.tls.internal.secretNames .component | default (printf "%s-tls" (include "baton.roleName" .)) }}
{{- end }}

{{- define "baton.podAnnotations" -}}
{{- $c := index .root.Values .component -}}
{{- $own := dict -}}
{{- if include "baton.isEngine" . -}}
{{- with $c.rdma.network }}{{ $_ := set $own "k8s.v1.cni.cncf.io/networks" . }}{{ end -}}
{{- end -}}
{{- with merge (dict) $c.podAnnotations $own }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* What is spread is this component's pods, where a constraint does not say otherwise; those of one rollout, so that a
pod that is about to go counts for nothing. */}}
{{- define "baton.spread" -}}
{{- $c := index .root.Values .component -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "baton.selectorLabels" . | fromYaml)) -}}
{{- if not (include "baton.isGroup" .) }}{{ $_ := set $selector "matchLabelKeys" (list "pod-template-hash") }}{{ end -}}
{{- range $c.topologySpreadConstraints }}
- {{ toYaml (merge (dict) . (hasKey . "labelSelector" | ternary (dict) $selector)) | nindent 2 | trim }}
{{- end }}
{{- end }}

{{/* What a pod's labels call it. */}}
{{- define "baton.podComponent" -}}
{{ .component }}{{ if .ranks }}-ranks{{ end }}
{{- end }}

{{/* Whether a component's workers are on several machines each. */}}
{{- define "baton.isSpread" -}}
{{- if and (include "baton.isEngine" .) (gt (int (index .root.Values .component).machines.count) 1) }}true{{ end }}
{{- end }}

{{/* Whether these are groups of pods, and not a pod and machines of a Ray cluster. */}}
{{- define "baton.isGroup" -}}
{{- if and (include "baton.isSpread" .) (not (index .root.Values .component).machines.rayAddress) }}true{{ end }}
{{- end }}

{{- define "baton.ranksPort" -}}
50053
{{- end }}

{{- define "baton.pod" -}}
{{- $c := index .root.Values .component -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" (dict "root" .root "component" (include "baton.podComponent" .)) | nindent 4 }}
    app.kubernetes.io/part-of: baton
    {{- if not .ranks }}
    baton.internal/role: {{ .component }}
    {{- end }}
    {{- with $c.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "baton.podAnnotations" . }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.roleName" . }}
  automountServiceAccountToken: {{ eq .component "router" }}
  {{- /* Names of other Services are no business of a process, and would look like its configuration. */}}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "baton.grace" . }}
  {{- if $c.hostNetwork }}
  hostNetwork: true
  {{- end }}
  {{- with $c.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" $c.hostNetwork) }}
  dnsPolicy: {{ . }}
  {{- end }}
  {{- with $c.dnsConfig }}
  dnsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurity" . | nindent 4 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with include "baton.priorityClass" . }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $c.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- $claims := $c.resourceClaims }}
  {{- if include "baton.claimsGpus" . }}
  {{- $claims = append $claims (dict "name" "gpus" "resourceClaimTemplateName" (printf "%s-gpus" (include "baton.componentName" .))) }}
  {{- end }}
  {{- with $claims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $c.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "baton.spread" . }}
  topologySpreadConstraints:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with include "baton.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "baton.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- /* Behind the image's own entrypoint, which passes signals on and reaps. */}}
      args: [baton-{{ ternary "ranks" .component (.ranks | default false) }}]
      env:
        {{- include (ternary "baton.ranksEnv" "baton.env" (.ranks | default false)) . | nindent 8 }}
      {{- if not .ranks }}
      ports:
        {{- include "baton.ports" . | nindent 8 }}
      {{- include "baton.probes" . | nindent 6 }}
      {{- with $c.preStopSeconds }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ . }}
      {{- end }}
      {{- end }}
      resources:
        {{- include "baton.resources" . | nindent 8 }}
      securityContext:
        {{- include "baton.processSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "baton.mounts" . | nindent 8 }}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
{{- end }}

{{/* A component's own, or the chart's, where it makes some. */}}
{{- define "baton.priorityClass" -}}
{{- $c := index .root.Values .component -}}
{{- if $c.priorityClassName }}{{ $c.priorityClassName }}
{{- else if .root.Values.priorityClasses.create }}
{{- include "baton.fullname" .root }}-{{ if include "baton.hasWeights" . }}engine{{ else }}cpu{{ end }}
{{- end }}
{{- end }}
