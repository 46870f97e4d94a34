"""The preflight: what a cluster lacks for jobs to run, and how to set it."""

from rlhfless_operator.preflight.cluster import ClusterLook, preflight, stages_of
from rlhfless_operator.preflight.findings import Finding, Verdict, describe, failed

__all__ = ["ClusterLook", "Finding", "Verdict", "describe", "failed", "preflight", "stages_of"]
