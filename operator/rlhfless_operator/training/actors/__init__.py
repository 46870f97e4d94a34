"""The actors of a step.

- `rollout_actor`: one actor of a rollout. `actor_attempt`: one request of it. `heard`: reports of a request.
- `live_rollout`: the samples of a rollout that live actors have. `live_actor`: one of these actors.
  `live_measurements`: learn from their reports.
- `sampling_weights`: the weights that requests sample with. `sinks`: the stored parts of each sample.
- `looks`: the time that all rollouts may take to decide on moves.
- `generated`: the outcome of generation. `prepared`: the outcome of preparation.
"""
