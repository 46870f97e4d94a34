"""Pods that use the GPUs of a pool in turns: claims, the account of slots, and the change of hands."""
