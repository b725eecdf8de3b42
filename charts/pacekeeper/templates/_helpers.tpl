{{- define "pacekeeper.labels" -}}
app.kubernetes.io/name: pacekeeper
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "pacekeeper.selector" -}}
app.kubernetes.io/name: pacekeeper
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* repository:tag of an image; the tag defaults to the chart's appVersion. */}}
{{- define "pacekeeper.image" -}}
{{ .image.repository }}:{{ .image.tag | default .context.Chart.AppVersion }}
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

{{/* The operator as the subject of a binding. */}}
{{- define "pacekeeper.operator" -}}
- {kind: ServiceAccount, name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}}
{{- end }}

{{/* The Secret with a serving certificate that somebody else makes; empty: the operator has an authority of its own. */}}
{{- define "pacekeeper.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ .Release.Name }}-tls{{ else }}{{ .Values.tls.existingSecret }}{{ end }}
{{- end }}

{{/* Not empty: wanted, and known to the cluster. Asked by version: `helm template` knows no cluster's list of kinds. */}}
{{- define "pacekeeper.hasAdmissionPolicies" -}}
{{- if and .Values.admissionPolicy.enabled (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) }}true{{ end }}
{{- end }}
