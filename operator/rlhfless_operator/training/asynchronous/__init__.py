"""Jobs that generate ahead of their learner: `loop` takes the steps, `rollouts_ahead` fills the buffer."""
