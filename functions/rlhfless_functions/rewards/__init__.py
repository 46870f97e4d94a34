"""Rewards: the user's own functions and the built-in verifiers, run in killable worker processes.

`scoring` is the entrance. Everything that a worker imports is kept light (no torch, no pydantic), because a worker
that was killed is started again while the step waits. Modules marked *(worker)* run there, the others in the
preparation function:

    scoring            all rewards of a job, weighted and summed
    pool               the workers of one reward: time limits, retries, outcomes
    process            one worker process as its parent sees it
    channel            frames on the socket between the two
    groups             what is scored
    worker (worker)    the worker's two processes: a reaper that nothing escapes, and the one that runs the code
    reaper (worker)    the reaper's part
    calls (worker)     one call: its result made plain, its failure made one sentence
    source (worker)    the user's file
    callables (worker) TRL's and verl's function forms
    remote (worker)    OpenRLHF's HTTP form
    matching, mathematics, execution (worker)
                       the built-in verifiers
    checks (worker)    their checks of single responses, which can be killed
    code_runner            what runs a response's code, in a process of its own
    code_judge             what runs the tests of it, in another
    code_values            what the two tell each other
    length             soft over-long punishment
    model              a sequence-classification reward model
"""
