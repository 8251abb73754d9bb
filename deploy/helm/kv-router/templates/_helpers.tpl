{{- define "kv-router.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kv-router.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := include "kv-router.name" . }}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kv-router.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kv-router.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kv-router.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kv-router.selectorLabels" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kv-router.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "kv-router.fullname" .) }}{{ else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "kv-router.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kv-router.listenPort" -}}
{{ dig "listen" "port" 8080 .Values.config }}
{{- end }}

{{- define "kv-router.siblingsPort" -}}
{{ dig "siblings" "listen" "" .Values.config | default "" | splitList ":" | last }}
{{- end }}

{{/* Port name to number, as YAML, of what Envoy may ask. */}}
{{- define "kv-router.envoyPorts" -}}
{{- range $name := list "ext_authz" "ext_proc" }}
{{- with dig "envoy" $name nil $.Values.config }}
{{ $name | replace "_" "-" }}: {{ .port }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kv-router.scheme" -}}
{{ ternary "HTTPS" "HTTP" (not (empty (dig "listen" "tls" nil .Values.config))) }}
{{- end }}

{{/* Whether pods are asked for with the pod's own service account; "" for no. */}}
{{- define "kv-router.usesApi" -}}
{{- $kubernetes := dig "discovery" "kubernetes" nil .Values.config }}
{{- if and $kubernetes (not (dig "api" "url" "" $kubernetes)) }}true{{ end }}
{{- end }}

{{- define "kv-router.engineNamespace" -}}
{{- $kubernetes := dig "discovery" "kubernetes" nil .Values.config | default dict }}
{{- $kubernetes.namespace | default .Release.Namespace }}
{{- end }}

{{/* The engines' ports as NetworkPolicy has them: one range for each kind, a port a rank. */}}
{{- define "kv-router.enginePorts" -}}
{{- $engines := .Values.networkPolicy.engines }}
{{- range $engines.httpPorts }}
- {port: {{ . }}}
{{- end }}
{{- range list $engines.eventPortBase $engines.replayPortBase $engines.loadPortBase }}
{{- if . }}
- {port: {{ . }}{{ if gt (int $engines.dpSize) 1 }}, endPort: {{ sub (add (int .) (int $engines.dpSize)) 1 }}{{ end }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "kv-router.grace" -}}
{{- $drain := dig "timeouts" "drain_s" 5 .Values.config }}
{{- $grace := dig "timeouts" "grace_s" 60 .Values.config }}
{{- add (int (ceil $drain)) (int (ceil $grace)) .Values.terminationMarginSeconds }}
{{- end }}
