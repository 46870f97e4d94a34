"""The groups that a step learns from."""
