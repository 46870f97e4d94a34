"""The job document.

- `sections` has its fields, and `spec` the document with its rules. Smaller sections have files of their own.
- `rules`, `async_rules`: what fields may stand beside each other; `rule` is the form of a rule.
- `instance_gpus`: the pods of each stage and the GPUs of an instance. `instance_prices`: its price. `prices`: the
  fields that set it.
- `reading/`: read a document and its files, and say what is wrong and how to mend it.
- `generated/`: the CRD, the rules of the API server and the reference, made from the fields.
- `actor_range`: how many actors a step may have. `resource_status`: the status of the Kubernetes resource.
"""
