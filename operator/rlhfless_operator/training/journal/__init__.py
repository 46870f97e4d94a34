"""What a driver writes down: steps (`step_journal`), instance-seconds (`ledger`), its lease, samples and metrics."""
