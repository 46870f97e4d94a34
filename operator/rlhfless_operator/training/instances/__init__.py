"""The instances of a job.

- `capacity`: how many it holds, and how long. `instance_queue`: hand instances to actors. `gang`: instances that learn
  together. `away`: let actors go while all of their samples wait for environments.
- `relays`: the chain in which instances pass new weights on. `weights_traffic`: count the bytes of weights that they
  read.
- `draft_history`: the steps whose responses are kept to draft from.
"""
