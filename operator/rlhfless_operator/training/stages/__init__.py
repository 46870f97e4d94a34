"""The stages of a step.

`rollout` generates (`generation`) and prepares (`preparation`) a step's groups, and `learning` learns from them. A job
also evaluates (`evaluation`), exports its model (`export`) and reads its data (`datasets`).
"""
