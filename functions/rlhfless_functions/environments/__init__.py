"""Environments: what the model acts in, turn by turn. Generation asks, and environments answer in tokens.

- `episodes`: the seam between generation and environments.
- `making`: makes the environments of a request, and finds what prompts show of them.
- `playing`: plays the episodes of a share: limits, faults, replays.
- `sessions`: an episode on a process or a server, and its faults. `results`: its texts as the model reads them.
- `bridge`: the chat template's tokens between turns. `tool_calls`: reads the model's calls.
- `host`: the processes of episodes from their parent's view.
- `shelter`: a process that has the episodes while their actors are let go. `sheltered`: an actor's view of it.
- `connections`: WebSockets to servers of environments. `openenv`: a client of servers of OpenEnv. `openenv_messages`:
  what they answer. `served`: a client of `server`.
- `emulated`: the environments of a rehearsal, as slow as those of a trace.

On CPUs of their own:

- `server`: a server of the user's environments.

In workers:

- `worker`: runs the user's files once, and forks a process for each episode. `user_code`: the class and the functions.
  `schemas`: what prompts show of the tools.
"""
