"""Rewards: the user's own functions and the built-in verifiers, in worker processes that can be killed.

`scoring` is the entry point. Workers import only light modules (no torch, no pydantic), because a killed worker
restarts while the step waits. Modules marked *(worker)* run in workers, the others in the preparation function:

    scoring            all rewards of a job, weighted and summed
    pool               the workers of one reward: time limits, retries, outcomes
    process            one worker process from its parent's view
    channel            frames on the socket between the two
    groups             the responses to score
    worker (worker)    the worker's two processes: a reaper that ends everything, and the one that runs the code
    reaper (worker)    the reaper's part
    calls (worker)     one call: converts its result to plain values, and its failure to one sentence
    source (worker)    the user's file
    callables (worker) TRL's and verl's function forms
    remote (worker)    OpenRLHF's HTTP form
    matching, mathematics, execution (worker)
                       the built-in verifiers
    checks (worker)    their checks of single responses, which can be killed
    code_runner            runs a response's code, in a process of its own
    code_judge             runs its tests, in another process
    code_values            the messages between the two
    length             soft over-long punishment
    model              a sequence-classification reward model
"""
