"""The control plane of rlhfless. It never imports torch.

From the top down:

- `cli`: the command line. `commands/`: its commands with their options.
- `controller/`: the operator: it watches a cluster's jobs and drives each of them.
- `local/`: run functions on this machine.
- `simulator/`: compare policies, and forecast a job's steps, without GPUs.
- `training/`: the training loop.
- `preflight/`: check that a cluster can run jobs.
- `report/`: show a run. `convert/`: make jobs from the configurations of other frameworks.
- `platforms/`: the places where functions run.
- `job/`: the job document.
- `planner/`: decide, without I/O and without a clock.
- `records/`: the files that a job writes, with their readers.
- `knative/`: the client of Knative and Kubernetes.
- `errors`: errors for the user. `console`: tables on the terminal. `formatting`: numbers for people.
"""
