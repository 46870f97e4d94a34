"""The stages of a step.

- `rollout`: generate and prepare the groups of a step. `rollout_record`: its metrics, and what later plans learn from
  it.
- `generation`: a rollout with actors of its own, moves and losses. `generation_settings`: its settings. `prefix_plans`:
  let its actors share prefixes.
- `live_actors`: the actors of an asynchronous job, whose batches go on from rollout to rollout. `live_generation`: the
  part of one rollout.
- `replacing`: draw fresh prompts for groups that teach nothing, while the rollout goes on.
- `preparation`: prepare groups as they complete. `unscorable`: the limit on samples without a reward.
- `learning`: learn from the batch. `learner_listener`: hear a learner. `learner_choice`: the number of learners.
  `arrivals`: the groups that a learner can expect. `piece_journal`: the pieces that it learns from. `mismatch`: the
  limit on its disagreement with the engine. `damaged_checkpoints`: start from an older one.
- `rollout_watch`: forecast its end, and have instances ready for their work and not before. `state_saving`: write a
  checkpoint beside the next step. `letting_go`: save the state of a learner that would stand idle, and let it go.
  `taking_up`: load the state of a fresh one beside the end of generation. `holding`: keep all instances for a whole
  step. `idling`: warn of instances that idled for longer than a switch costs.
- `look_ahead`: plan what comes next, and warm its instances. `affordable`: check the budget.
- `evaluation`: evaluate. `export`: publish the model. `datasets`: read the data. `changed_settings`: apply a changed
  document. `changed_inputs`: take changed files.
"""
