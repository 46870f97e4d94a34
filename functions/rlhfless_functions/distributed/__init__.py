"""Processes that learn together.

- `ranks`: find each other and exchange data. `sharding`: divide a model among the ranks.
"""
