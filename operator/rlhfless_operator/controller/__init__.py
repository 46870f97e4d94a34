"""The operator: it watches RLHFJobs and drives each of them.

- `main`: connect settings, clients, handlers, metrics and leader election. `handlers`: the functions that kopf calls.
  `context`: the objects that all jobs share.
- `job`: supervise one job, the reconcile. `resource`: choose the next action for a job. `driving`: run its driver.
  `outcome`: the effect of a driver's end on its job.
- `status_writer` and `status_updates`: write a job's status. `conditions`: its conditions. `cluster_report`: tell the
  user what the cluster lacks.
- `functions`: make the platforms of jobs, with `environments`: the servers of an environment. `metering`: measure them.
  `prometheus`: the operator's metrics, with `figures`. `logs`: its log.
- `pools`, `slots` and `room`: divide the GPUs of a pool among jobs. `queueing` and `kueue`: let jobs wait in Kueue's
  queues. `nodes`: the GPUs of nodes.
- `admission` and `slot_admission`: change new pods. `endpoints`: serve metrics, liveness and the webhooks.
- `tenancy`: keep jobs from each other. `leadership`: elect the leading replica.
"""
