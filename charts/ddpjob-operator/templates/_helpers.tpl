{{- /* A release may be named 2.x; a Service has no dots in its name and begins with a letter. */ -}}
{{- define "operator.name" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $release -}}
{{- $release = printf "ddpjob-%s" $release -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if hasSuffix "operator" $release -}}
{{- $release | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-operator" ($release | trunc 41 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "operator.selector" -}}
app.kubernetes.io/name: ddpjob-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Settings of the pod that the operator and the dashboard share, after their own service account. */ -}}
{{- define "operator.podSettings" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Other labels than the operator's, whose Deployment, Service and policies choose pods by theirs. */ -}}
{{- define "dashboard.selector" -}}
app.kubernetes.io/name: ddpjob-dashboard
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "dashboard.labels" -}}
{{- merge (include "dashboard.selector" . | fromYaml) (include "operator.labels" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "operator.image" -}}
{{- $tagged := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- .Values.image.digest | empty | ternary $tagged (printf "%s@%s" $tagged .Values.image.digest) -}}
{{- end -}}

{{- define "operator.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "operator.name" . -}}
{{- else -}}
{{- fail "serviceAccount.name: with serviceAccount.create false, set the name of the ServiceAccount that the operator uses" -}}
{{- end -}}
{{- end -}}

{{- define "operator.replicas" -}}
{{- .Values.replicas | int | eq 0 | ternary 0 (max (int .Values.replicas) (int .Values.shards)) -}}
{{- end -}}

{{- /* Names of the Leases for every number of shards: while an upgrade changes it, replicas of both numbers run. */ -}}
{{- define "operator.leases" -}}
{{- $name := include "operator.name" . -}}
- {{ $name }}
{{- range $count := untilStep 2 11 1 }}
{{- range $shard := until $count }}
- {{ printf "%s-%d-of-%d" $name $shard $count }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "operator.keySecret" -}}
{{- .Values.key.existingSecret | default (printf "%s-key" (include "operator.name" .)) -}}
{{- end -}}

{{- /* What the operator may do to jobs and their objects. Used in a ClusterRole, or in a Role per namespace. */ -}}
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
  resources: [services]
  verbs: [get, list, watch, create]
# Jobs of a namespace share the ConfigMap of the runtime, and each adds itself to its owners by a patch. No resourceNames:
# the names change with the runtime's version, and operators of two versions act in turn during an upgrade.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch{{ if .Values.rbac.deleteConfigMaps }}, delete{{ end }}]
# The jobs' tokens; the operator never reads a Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create]
# Gangs, where the cluster serves them: Kubernetes' own, and Volcano's.
- apiGroups: [scheduling.k8s.io{{ if .Values.queues.volcano }}, scheduling.volcano.sh{{ end }}]
  resources: [podgroups]
  verbs: [get, list, watch, create, delete]
{{- if .Values.queues.kueue }}
# Requests for quota, of jobs in a queue of Kueue's.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
# The claim by which of two operators only one acts in a namespace. A rule cannot restrict a creation by name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [ddpjob-jobs]
  verbs: [get, update]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
