"""The operator: it watches RLHFJobs and drives each of them.

- `main` connects settings, clients, handlers, metrics and leader election. `handlers` are what kopf calls.
- `job` supervises one job: the reconcile. `resource` decides what to do about a job, `outcome` what its driver's end
  means, and `driving` runs the driver.
- `status_writer` and `status_updates` write a job's status, `conditions` its conditions, and `cluster_report` what the
  cluster lacks.
- `functions` makes the platforms of jobs, and `metering` measures them. `pools`, `slots` and `room` divide the GPUs of
  a pool among jobs; `queueing` and `kueue` let jobs wait in Kueue's queues.
- `admission` and `slot_admission` change new pods. `endpoints` serves metrics, liveness and the webhooks.
- `ownership` guards a job's folder, and `leadership` elects the leading replica.
"""
