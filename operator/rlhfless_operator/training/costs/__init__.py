"""The costs of a job's work, learnt from its steps, and the plans made from them.

- `cost_model`: lengths, speeds and start-ups of one job. `observations`: what requests say of an instance's speed.
  `starting_point`: the speed of an engine before its first step. `state_times`: how long instances start, wake and end.
- `measured_drafts`: the drafts of an earlier run. `measured_acting`: its environments. `engine_factor`:
  how far its engine was from its GPU's table.
- `generation_plan`: plan one generation. `step_plans`: make the next step's plan while the learner works.
  `live_migration`: choose moves while a plan is carried out.
- `prefix_choice`: decide whether actors share prefixes. `prefix_sharing`: the prefixes that one actor computes for
  others.
- `passes`: the models that each stage passes samples through. `model_shape`: the shape of a model. `hub`: its
  configuration on the Hugging Face hub.
"""
