{{/*
What the operator may do where PDClusters are.  One rule for each reason; `patch` is server-side apply, and with `create`
it makes what is missing.  A right that is not in this list is one that the code does not use.
*/}}
{{- define "pdcluster.rules" -}}
# Reads the objects of users, and writes nothing but their status.
- apiGroups: [pdcluster.io]
  resources: [pdclusters]
  verbs: [get, list, watch]
- apiGroups: [pdcluster.io]
  resources: [pdclusters/status]
  verbs: [patch]
# A scaler for each pool, which `kubectl scale` and autoscalers write to.
- apiGroups: [pdcluster.io]
  resources: [pdpoolscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [pdcluster.io]
  resources: [pdpoolscalers/status]
  verbs: [patch]
# Workers and etcd, and the snapshot that each set of workers is rendered from.
- apiGroups: [apps]
  resources: [statefulsets, deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
# Ingress and peer Services, engine and policy files, the workers' identity (which gets no rights).
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# The cluster's certificate authority and certificate, and reading the TLS Secret of an etcd of your own
# and whether that of API keys holds any.  Kubernetes cannot limit this to labelled Secrets: watchNamespaces
# limits it to namespaces.  Owner references delete them.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch]
# Disruption budgets and network policies of each cluster.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# A pool for gateways, where a PDCluster names an endpoint picker and the kind is installed.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
# PodGroups of workers of several pods, where a PDCluster asks for a gang scheduler and its kind is installed.
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
# To find why a worker is not ready.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- if .Values.deleteLostPods }}
# Of nodes that are lost.
- apiGroups: [""]
  resources: [pods]
  verbs: [delete]
{{- end }}
# To find why a worker was not created.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
# To report what the operator did, and what a user should look at.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
