"""The pods of a stage on a cluster.

- `job_objects`: create and remove the objects of a job's functions. `manifests`: their manifests. `egress`: the
  destinations of pods. `affinity`: place pods near each other. `store_mounts`: keep them out of others' folders.
- `stage_pods`: the book of a stage's pods. `pod_watch`: the watch that fills it. `pod_events`: warnings about a pod.
  `node_places`: the location of nodes.
- `environment_manifests`: the manifests of an environment's servers. `environment_pods`: the book of their pods, and
  their least number. `shelter_manifests` and `shelter_pods`: the same for the pod that keeps episodes.
- `stage_scaler`: control the number of a stage's pods. `scaling`: compute it.
- `dispatch`: send a request until a pod takes it. `direct_questions`: ask a pod past Knative.
"""
