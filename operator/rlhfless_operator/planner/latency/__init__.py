"""The latency of an instance: models, tables of devices, and calibration by measurements.

- `linear`: the linear model of a decode step, and the tables that it is fitted to.
- `drafting`: the latency of an instance that drafts tokens.
- `roofline`: latency and memory by a GPU's data sheet.
- `measured`: measured tables.
- `devices`: the model's shape, an instance's profile, and the stages' seconds for each token on a named GPU.
- `gpu_names`: a GPU's data sheet by the name of the product.
- `calibration`: learn the latency of a job's own instances.
"""
