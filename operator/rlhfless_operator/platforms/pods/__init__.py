"""The pods of a stage on a cluster: manifests, scale, and the pod that a task goes to."""
