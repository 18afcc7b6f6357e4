{{- define "operator.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if hasSuffix "operator" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "operator.selector" -}}
app.kubernetes.io/name: ddpjob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "operator.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "operator.name" . -}}
{{- else -}}
{{- fail "serviceAccount.name: with serviceAccount.create false, name the ServiceAccount the operator shall use" -}}
{{- end -}}
{{- end -}}

{{- define "operator.keySecret" -}}
{{- .Values.key.existingSecret | default (printf "%s-key" (include "operator.name" .)) -}}
{{- end -}}

{{- /* What the operator does to jobs and what belongs to them. Used in a ClusterRole, or in a Role per namespace. */ -}}
{{- define "operator.rules" -}}
- apiGroups: [ddpjob.io]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [ddpjob.io]
  resources: [ddpjobs/status]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete, patch]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
