"""The walls between the jobs of different namespaces, and between any job and the operator.

- `folders`: where a job's folder may be. `ownership`: whose work is in it.
- `threads`: the threads that read and write it.
"""
