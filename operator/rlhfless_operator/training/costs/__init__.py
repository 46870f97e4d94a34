"""What a job has learnt of its lengths, speeds and start-ups (`cost_model`), and the plans made from it."""
