"""The plan of a step: actors, shares, learner GPUs, and the forecast of its time and cost."""
