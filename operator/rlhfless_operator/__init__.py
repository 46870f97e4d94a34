"""The control plane of rlhfless. It never imports torch."""
