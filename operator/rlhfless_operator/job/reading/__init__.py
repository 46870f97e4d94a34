"""The reader of a job document and the files that it names. It reports each fault with its field, line and remedy.

- `validation`: read a job, or report all of its faults at once.
- `elsewhere`: read the documents of strangers in a process that can be killed.
- `yaml_document`: read YAML as the API server's tools do. `overrides`: the values of `--set`.
- `fields`: the fields of the document as a flat list. `experimental`: the experimental options of a job.
  `timing`: options with which two runs differ.
- `remedies`: the messages. `familiar_names`, `familiar_values`: fields of other frameworks, and their values here.
- `job_files`: check that files exist. `file_contents`: check that they fit the job, with `data_files` (columns) and
  `model_files` (configuration and layers).
- `trackers`: check that the packages of trackers are installed.
"""
