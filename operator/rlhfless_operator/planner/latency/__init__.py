"""How long an instance takes: models of latency, tables of devices, and calibration by measurements."""
