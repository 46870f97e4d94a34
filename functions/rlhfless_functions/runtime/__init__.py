"""The process of a function: its task, logs, processes, addresses and memory."""
