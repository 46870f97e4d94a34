"""Rewards: the user's own functions and the built-in verifiers, in worker processes that can be killed.

`scoring` is the entry point. Workers import only light modules (no torch, no pydantic), because a killed worker
restarts while the step waits. In the preparation function:

- `scoring`: all rewards of a job, weighted and summed.
- `pool`: the workers of one reward, with time limits, retries and outcomes.
- `process`: one worker process from its parent's view. `channel`: frames on the socket between the two.
- `length`: soft over-long punishment. `model`: a sequence-classification reward model.

In workers:

- `worker`: the worker's two processes. `reaper`: the one that ends everything; the other runs the reward.
- `seccomp`: refuses system calls to tested code.
- `calls`: one call; converts its result to plain values, and its failure to one sentence.
- `groups`: the responses to score.
- `source`: the user's file. `signatures`: the reward of a file whose function no job names. `callables`: the function
  forms of TRL, verl and OpenRLHF. `remote`: OpenRLHF's HTTP form.
- `matching` and `mathematics`: built-in verifiers. `truths`: ground truths of any form.
- `truth_check`: reads them before training.
- `thoughts`: the part of a response that answers.
- `checks`: checks of single responses, which can be killed.
- `code/`: unit tests of a response's code, in processes of their own.
"""
