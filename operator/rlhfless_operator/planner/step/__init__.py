"""The plan of a step (`generation`): actors, shares, learner GPUs, and the forecast of its time and cost."""
