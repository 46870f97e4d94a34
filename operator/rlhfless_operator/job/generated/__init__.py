"""The products of a job's fields.

- `crd`: the CustomResourceDefinition. `reference`: the reference page.
- `section_rules`: the checks of settings for the API server. `change_rules`: the rules for changes of a job.
"""
