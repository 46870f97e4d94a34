"""The job document.

- `spec`: the whole document. `sections`: its fields. Some sections have files of their own: `asynchrony`,
  `instance_ranges`, `outputs`, `pods`, `prices` and `rehearsal`.
- `keep_alive`: the values of `keepAlive`. `quantities`: Kubernetes' quantities. `paths`: tell paths from other strings.
- `rules`, `async_rules`, `environment_rules`: rules over several fields. `rule`: the form of a rule.
- `charged`: the names under which a job pays.
- `instance_gpus`: the pods of each stage and the GPUs of an instance. `instance_prices`: its price.
- `actor_range`: the number of actors that a step may have.
- `reading/`: read a document and its files, and report faults with their remedies.
- `generated/`: make the CRD, the rules of the API server and the reference from the fields.
- `redaction`: hide the secrets of a document from strangers.
- `resource_status`: the status of the Kubernetes resource.
"""
