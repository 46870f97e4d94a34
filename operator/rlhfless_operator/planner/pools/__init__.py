"""How jobs share the GPUs of a pool."""
