"""The process of a function.

- `task`: the task, its context and its errors. `store_errors`: turn the store's errors into a task's.
- `inbox`: lines that arrive for a task while it runs.
- `processes`: die with the parent, and show a name. `logs`: structured logs.
- `activity`: tell whether the process does anything. `landlock`: confine a thread to some folders.
- `addresses`: the address at which other hosts reach this one.
- `host_memory` and `device_memory`: find free memory, and release it.
"""
