{{/* Name of the operator's objects: the release's, with nameOverride or the chart's where it is not part of it already. */}}
{{- define "pdcluster.name" -}}
{{- $own := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $own .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $own | trunc 52 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Name of an object that has no namespace: two releases may not meet there. */}}
{{- define "pdcluster.clusterName" -}}
{{ printf "%s:%s" .Release.Namespace (include "pdcluster.name" .) }}
{{- end -}}

{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: pdcluster-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pdcluster.labels" -}}
{{ include "pdcluster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: pdcluster
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pdcluster.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "pdcluster.name" .) }}
{{- end -}}

{{/* An image's full name, from the chart and registry, repository, and tag or digest. */}}
{{- define "pdcluster.image" -}}
{{- $prefix := ternary "" (printf "%s/" (trimSuffix "/" .image.registry)) (empty .image.registry) -}}
{{- if .image.digest -}}
{{ printf "%s%s@%s" $prefix .image.repository .image.digest }}
{{- else -}}
{{ printf "%s%s:%s" $prefix .image.repository (.image.tag | default .chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number, in thousandths. */}}
{{- define "pdcluster.milli" -}}
{{- $units := dict "m" 1 "" 1e3 "k" 1e6 "M" 1e9 "G" 1e12 "T" 1e15 "Ki" 1024e3 "Mi" 1048576e3 "Gi" 1073741824e3 "Ti" 1099511627776e3 -}}
{{- $number := regexFind "^[0-9.e+]+" (toString .) -}}
{{ printf "%f" (mulf (float64 $number) (get $units (trimPrefix $number (toString .)))) }}
{{- end -}}

{{/* Whether objects of a kind of the Prometheus operator are made: true, or auto where the API server has the kind. */}}
{{- define "pdcluster.isMade" -}}
{{- $exists := .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) -}}
{{- if or (eq (toString .wanted) "true") (and (eq (toString .wanted) "auto") $exists) -}}true{{- end -}}
{{- end -}}
