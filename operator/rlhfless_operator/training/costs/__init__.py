"""The knowledge that a job gains of lengths, speeds and start-ups (`cost_model`), and the plans made from it."""
