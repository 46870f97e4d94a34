"""The data plane of rlhfless: the generation, preparation and learning functions."""
