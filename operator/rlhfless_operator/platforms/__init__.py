"""The places where functions run.

From the top down:

- `knative`: functions as Knative Services on a cluster.
- `local/`: functions as processes on this machine.
- `turns/`: pods that use the GPUs of a pool in turns.
- `pods/`: the pods of a stage on a cluster: their manifests, their scale, and where a task goes.
- `shared`: a platform whose GPUs several jobs share.
- `room`: count the GPUs that a cluster has for a job.
- `stream`: one task over HTTP.
- `base`: the protocol of a platform. `slots`: the account of who uses which GPU.
- `cluster_settings`: what the chart sets.
"""
