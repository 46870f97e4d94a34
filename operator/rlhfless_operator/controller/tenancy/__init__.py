"""The walls between the jobs of different namespaces, and between any job and the operator.

- `folders`: where a job's folder may be. `ownership`: whose work is in it.
- `mounts`: the volumes of its pods, checked before its folder is claimed.
- `threads`: the threads that read and write it.
"""
