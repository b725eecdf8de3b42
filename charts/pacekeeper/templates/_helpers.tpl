{{/* Name of all objects, or its prefix. It leaves 15 characters for the suffix of the longest name that is a label. */}}
{{- define "pacekeeper.fullname" -}}
{{- $name := include "pacekeeper.name" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "pacekeeper.name" -}}
{{ .Values.nameOverride | default .Chart.Name }}
{{- end }}

{{- define "pacekeeper.labels" -}}
{{ include "pacekeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pacekeeper.selector" -}}
app.kubernetes.io/name: {{ include "pacekeeper.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of an object with labels of its own: `more`, which override commonLabels. */}}
{{- define "pacekeeper.labelsWith" -}}
{{ toYaml (merge (dict) .more (include "pacekeeper.labels" .context | fromYaml)) }}
{{- end }}

{{/* repository@digest of an image, or repository:tag; the tag defaults to the chart's appVersion. */}}
{{- define "pacekeeper.image" -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}
{{- else }}{{ .image.repository }}:{{ .image.tag | default .context.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Restricted Pod Security, for the operator's pods. */}}
{{- define "pacekeeper.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pacekeeper.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Account, pull secrets, and placement of the operator's pods and of the pod that releases nodes. */}}
{{- define "pacekeeper.placement" -}}
serviceAccountName: {{ include "pacekeeper.serviceAccountName" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* extraEnv without duplicate names: depending on the request, the API server keeps one of two, or rejects both. */}}
{{- define "pacekeeper.extraEnv" -}}
{{- $names := dict }}
{{- range .Values.extraEnv }}
{{- if hasKey $names .name }}{{ fail (printf "extraEnv: %s is there twice: remove one of the two" .name) }}{{ end }}
{{- $_ := set $names .name true }}
{{- end }}
{{- toYaml .Values.extraEnv }}
{{- end }}

{{/* Refuses values with which the operator would not start: workers' policies have to name their scrapers. */}}
{{- define "pacekeeper.scrapersAreKnown" -}}
{{- if and .Values.prometheus.url .Values.networkPolicy.jobs (not .Values.networkPolicy.metricsFrom) }}
{{- $host := (urlParse .Values.prometheus.url).hostname | lower }}
{{- if not (or (contains ":" $host) (regexMatch "^([0-9.]+|[^.]*([.][^.]+)?|[^.]+[.][^.]+[.]svc([.].*)?)$" $host)) }}
{{- fail (printf "networkPolicy.metricsFrom: %s is neither a Service's name nor an address: name the pods that scrape the workers, like [{namespaceSelector: {matchLabels: {name: monitoring}}}], or set networkPolicy.jobs to false" $host) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pacekeeper.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (include "pacekeeper.fullname" .) }}
{{- end }}

{{/* The operator as the subject of a binding; below, its name in the API server. */}}
{{- define "pacekeeper.operator" -}}
- {kind: ServiceAccount, name: {{ include "pacekeeper.serviceAccountName" . }}, namespace: {{ .Release.Namespace }}}
{{- end }}

{{- define "pacekeeper.username" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ include "pacekeeper.serviceAccountName" . }}
{{- end }}

{{/* The Secret with a serving certificate that the operator does not create; empty: the operator has its own CA. */}}
{{- define "pacekeeper.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "pacekeeper.fullname" . }}-tls{{ else }}{{ .Values.tls.existingSecret }}{{ end }}
{{- end }}

{{/* Not empty: enabled, and supported by the cluster. It checks the version, as `helm template` has no cluster's list of kinds. */}}
{{- define "pacekeeper.hasAdmissionPolicies" -}}
{{- if and .Values.admissionPolicy.enabled (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) }}true{{ end }}
{{- end }}
