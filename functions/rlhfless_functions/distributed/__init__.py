"""Processes that learn together: `ranks`, and a model that is divided among them (`sharding`)."""
