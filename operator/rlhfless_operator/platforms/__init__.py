"""The places where functions run.

From the top down:

- `knative`: run functions as Knative Services on a cluster.
- `local/`: run functions as processes on this machine.
- `turns/`: let jobs use the slots of a pool in turns, with pods that sleep or with whole GPUs.
- `pods/`: create and scale the pods of a stage, and choose the pod of a task.
- `room`: count the generation instances that fit on a cluster.
- `stream`: run one task over HTTP. `live_request`: a request whose body stays open.
- `job_platform`: the one wrapper around a job's platform on a cluster, with its hooks.
- `environments`: the address of an environment's server in tasks. `shelters`: what keeps episodes while actors are
  let go, and the driver's questions to it.
- `pool_member`: the record of a job in its pool.
- `base`: the protocol of a platform. `slots`: the account of GPUs that instances use in turns.
- `cluster_settings`: the settings that the chart makes.
"""
