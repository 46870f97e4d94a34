"""The preflight checks that a cluster can run jobs, and names the remedies."""

from rlhfless_operator.preflight.cluster import ClusterLook, preflight, stages_of
from rlhfless_operator.preflight.findings import Finding, Verdict, describe, failed
from rlhfless_operator.preflight.fixing import agrees, fix

__all__ = ["ClusterLook", "Finding", "Verdict", "agrees", "describe", "failed", "fix", "preflight", "stages_of"]
