"""The places where functions run.

From the top down:

- `knative`: functions as Knative Services on a cluster.
- `local/`: functions as processes on this machine.
- `turns/`: jobs that use the slots of a pool in turns, with pods that sleep and with whole GPUs.
- `pods/`: the pods of a stage on a cluster: their manifests, their scale, and where a task goes.
- `room`: count the GPUs that a cluster has for a job.
- `stream`: one task over HTTP.
- `job_platform`: the one wrapper around a job's platform on a cluster, with its hooks.
- `pool_member`: the record of a job in its pool.
- `base`: the protocol of a platform. `slots`: the account of who uses which GPU.
- `cluster_settings`: what the chart sets.
"""
