"""The preflight checks that a cluster can run jobs, and names the remedies.

- `cluster`: fetch the cluster's objects, and check them. `findings`: the outcomes of checks.
- `checks`: the checks of one object each. `features`: Knative's feature flags. `knative_settings`: the other settings
  of Knative. `permissions`: the operator's permissions.
- `turns`: the checks of pools whose GPUs pods use in turns. `devices`: count their devices. `nodes`: the GPU products
  of nodes. `kernels`: what nodes lack to confine tested code.
- `fixing`: `rlhfless preflight --fix`. `fixes`: the changes that it makes.
"""

from rlhfless_operator.preflight.cluster import ClusterLook, preflight, stages_of
from rlhfless_operator.preflight.findings import Finding, Verdict, describe, failed
from rlhfless_operator.preflight.fixing import agrees, fix
