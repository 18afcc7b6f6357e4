{{- /* A release may be named 2.x, but a Service's name begins with a letter and has no dots. */ -}}
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

{{- /* The dashboard's labels differ from the operator's, by which its Deployment, Service and policies select pods. */ -}}
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
{{- fail "serviceAccount.name: empty, although serviceAccount.create is false; set the name of the ServiceAccount that the operator uses" -}}
{{- end -}}
{{- end -}}

{{- define "operator.replicas" -}}
{{- .Values.replicas | int | eq 0 | ternary 0 (max (int .Values.replicas) (int .Values.shards)) -}}
{{- end -}}

{{- /* Names of the Leases for every number of shards. While an upgrade changes it, replicas with both numbers run. */ -}}
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

{{- /* The operator's permissions on jobs and their objects, for a ClusterRole or for a Role in each namespace. */ -}}
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
# The jobs of a namespace share the ConfigMap of the runtime, and a patch adds each job to its owners. The rule has no
# resourceNames, because the names change with the runtime's version, and two versions may act during an upgrade.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch{{ if .Values.rbac.deleteConfigMaps }}, delete{{ end }}]
# The jobs' tokens. The operator never reads a Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create]
# Gangs, if the cluster serves them: PodGroups of Kubernetes and of Volcano.
- apiGroups: [scheduling.k8s.io{{ if .Values.queues.volcano }}, scheduling.volcano.sh{{ end }}]
  resources: [podgroups]
  verbs: [get, list, watch, create, delete]
{{- if .Values.queues.kueue }}
# Quota requests of jobs in a Kueue queue.
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
# The Lease by which only one operator acts in a namespace. A rule cannot restrict creations by name.
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
