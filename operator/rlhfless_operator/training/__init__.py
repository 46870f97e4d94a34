"""The training loop: it takes a job through its steps.

From the top down:

- `driver`: start or resume a job, and end it in every way that a job ends.
- `loop`: take one step after another.
- `asynchronous/`: the same for a job that generates ahead of its learner.
- `stages/`: roll out, prepare, learn, evaluate and export.
- `run`: the objects that never change while a driver trains. `replaying`: repeat a finished job by its journal.
- `requests/`: make the requests of each stage, and retry a task.
- `costs/`: learn what a job's work takes, and plan with it.
- `actors/`: the actors of a step, their samples, and the moves between them.
- `instances/`: hold, warm and hand over instances.
- `data/`: draw prompts.
- `journal/`: write down a step, the ledger and the lease, and remove what is not needed.
"""
