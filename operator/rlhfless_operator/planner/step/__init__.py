"""The plan of a step: its samples divided over instances, and a forecast to its end.

From the top down:

- `generation`: plan the generation of a job's next step, from what the job knows.
- `async_planning`: plan a step of an asynchronous job. `rates` splits its instances by the rates of the stages.
- `whole_step`: plan generation together with preparation and learning.
- `forecast`: forecast a division to the end of the step.
- `planning`: divide samples over instances within a deadline or a budget, or by λ.
- `holding`: charge a step whose instances stay instead of being let go and started again.
- `overlap`, `pace`: work off groups while others decode; `pace` also lets the learner go while it waits.
- `bounds`, `least_period`: bounds that no plan and no order of the work goes below.
- `preparers`, `learner_scaling`, `chunks`: choose how many instances prepare, how many learn, and how many groups an
  instance prepares at a time.
- `loads`, `partition`, `admission`: samples as columns, cuts of a sorted chain, and the ends of admitted responses.
"""
