"""The data plane of rlhfless: the functions that generate, prepare and learn.

The three stages:

- `generation/`: sample responses.
- `preparation/`: turn data into prompts, and responses into the learner's input.
- `learning/`: make the next version of the weights.

A function as a server:

- `serving/`: an instance's HTTP server and its start.
- `api/`: the wire contract with the control plane.
- `settings/`: the settings of a job that both sides share.
- `runtime/`: a process's task, logs, addresses and memory.

What the stages share:

- `artifacts/`: the store of a job's files.
- `weights/`: models in the Hugging Face layout.
- `data/`: datasets, rollouts and traces.
- `rewards/`: the user's rewards and the built-in verifiers.
- `environments/`: what answers the turns of a response.
- `algorithms/`: the mathematics of reinforcement learning.
- `model/`: forward passes with gradients.
- `distributed/`: processes that learn together.
"""
