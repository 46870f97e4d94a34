"""The actors of a step: their samples, what they have produced, and moves between them."""
