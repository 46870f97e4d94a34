{{- define "rlhfless.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rlhfless.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rlhfless.labels" -}}
{{ include "rlhfless.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "rlhfless.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rlhfless.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Whether there is a pool whose GPUs pods use in turns: "true", or empty. */ -}}
{{- define "rlhfless.hasSlots" -}}
{{- range .Values.pools -}}{{- if .deviceClass -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- /* Whether the operator serves webhooks: "true", or empty. */ -}}
{{- define "rlhfless.hasWebhooks" -}}
{{- if or .Values.quickRelease.enabled .Values.placement.enabled (include "rlhfless.hasSlots" .) -}}true{{- end -}}
{{- end -}}

{{- /* Name of the webhooks' Service. */ -}}
{{- define "rlhfless.admission" -}}
{{- printf "%s-admission" (include "rlhfless.fullname" .) -}}
{{- end -}}

{{- /* Name of the Secret with the webhooks' certificate. */ -}}
{{- define "rlhfless.admissionSecret" -}}
{{- default (include "rlhfless.admission" .) .Values.quickRelease.certificate.secretName -}}
{{- end -}}

{{- /* An image's whole name; the argument is a list of its values and the chart's appVersion. */ -}}
{{- define "rlhfless.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 1) $image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Refuses values that contradict each other, naming the value and the remedy. */ -}}
{{- define "rlhfless.check" -}}
{{- $artifacts := .Values.artifacts -}}
{{- if hasPrefix "/" $artifacts.uri -}}
{{- if and (not $artifacts.existingClaim) (not $artifacts.hostPath) -}}
{{- fail (printf "artifacts.uri is a folder, %s, and nothing is mounted there: give artifacts.existingClaim or artifacts.hostPath, or an object store as artifacts.uri" $artifacts.uri) -}}
{{- end -}}
{{- else if or $artifacts.existingClaim $artifacts.hostPath -}}
{{- fail (printf "artifacts.uri is an object store, %s: remove artifacts.existingClaim and artifacts.hostPath" $artifacts.uri) -}}
{{- end -}}
{{- if and $artifacts.hostPath (not .Values.namespaces) -}}
{{- fail "artifacts.hostPath is given to function pods by a claim in each namespace with jobs: list them in namespaces" -}}
{{- end -}}
{{- range $name := list "artifacts" "files" -}}
{{- with index $.Values $name -}}
{{- if and .existingClaim .hostPath -}}
{{- fail (printf "%s.existingClaim and %s.hostPath are both given: remove one" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.cache.existingClaim (has .Values.cache.path (list $artifacts.uri .Values.files.path)) -}}
{{- fail (printf "cache.path is %s, where artifacts.uri or files.path is too: give another" .Values.cache.path) -}}
{{- end -}}
{{- if and .Values.cache.existingClaim (has .Values.cache.existingClaim (list $artifacts.existingClaim .Values.files.existingClaim)) -}}
{{- fail (printf "cache.existingClaim is %s, which artifacts.existingClaim or files.existingClaim is too, and a pod that mounts a claim twice never starts: give another" .Values.cache.existingClaim) -}}
{{- end -}}
{{- with .Values.quickRelease -}}
{{- if and (include "rlhfless.hasWebhooks" $) .certificate.secretName (not .certificate.caBundle) (not .annotations) -}}
{{- fail "quickRelease.certificate.secretName is given without its authority: give quickRelease.certificate.caBundle, or quickRelease.annotations by which it is put in" -}}
{{- end -}}
{{- if and .certificate.caBundle (not .certificate.secretName) -}}
{{- fail "quickRelease.certificate.caBundle is given without its certificate: give quickRelease.certificate.secretName" -}}
{{- end -}}
{{- if and (include "rlhfless.hasWebhooks" $) (has (int .port) (list (int $.Values.operator.metricsPort) (int $.Values.operator.livenessPort))) -}}
{{- fail (printf "quickRelease.port is %d, which operator.metricsPort or operator.livenessPort is too: give another" (int .port)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor.enabled and monitoring.podMonitor.enabled would scrape everything twice: disable one" -}}
{{- end -}}
{{- end -}}

{{- /* Name of the claim by which the artifacts' folder is mounted; empty for an object store. */ -}}
{{- define "rlhfless.artifactsClaim" -}}
{{- if .Values.artifacts.hostPath -}}
{{- printf "%s-artifacts" (include "rlhfless.fullname" .) -}}
{{- else -}}
{{- .Values.artifacts.existingClaim -}}
{{- end -}}
{{- end -}}

{{- /* What is mounted in the operator and in every function pod, as a YAML list of {name, mountPath, claim | hostPath, readOnly}. */ -}}
{{- define "rlhfless.mounts" -}}
{{- $mounts := list -}}
{{- with include "rlhfless.artifactsClaim" . -}}
{{- $mounts = append $mounts (dict "name" "artifacts" "mountPath" $.Values.artifacts.uri "claim" . "readOnly" false) -}}
{{- end -}}
{{- with .Values.files.existingClaim -}}
{{- $mounts = append $mounts (dict "name" "files" "mountPath" $.Values.files.path "claim" . "readOnly" true) -}}
{{- end -}}
{{- with .Values.files.hostPath -}}
{{- $mounts = append $mounts (dict "name" "files" "mountPath" $.Values.files.path "hostPath" . "readOnly" true) -}}
{{- end -}}
{{- toYaml $mounts -}}
{{- end -}}

{{- /* The defaults of every function pod: the values' own, with the chart's volumes, secrets and pull secrets put in front. */ -}}
{{- define "rlhfless.pods" -}}
{{- $pods := deepCopy .Values.pods -}}
{{- with include "rlhfless.mounts" . | fromYamlArray -}}
{{- $_ := set $pods "volumes" (concat . (default list $pods.volumes)) -}}
{{- end -}}
{{- with .Values.cache.existingClaim -}}
{{- $volume := dict "name" "cache" "mountPath" $.Values.cache.path "claim" . "readOnly" false -}}
{{- $_ := set $pods "volumes" (prepend (default list $pods.volumes) $volume) -}}
{{- $_ := set $pods "env" (merge (default dict $pods.env) (dict "RLHFLESS_CACHE" $.Values.cache.path)) -}}
{{- end -}}
{{- with .Values.artifacts.secrets -}}
{{- $_ := set $pods "envFrom" (concat . (default list $pods.envFrom)) -}}
{{- end -}}
{{- with .Values.imagePullSecrets -}}
{{- $_ := set $pods "imagePullSecrets" (concat . (default list $pods.imagePullSecrets)) -}}
{{- end -}}
{{- toJson $pods -}}
{{- end -}}
