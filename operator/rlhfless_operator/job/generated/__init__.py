"""What is made from a job's fields: the CRD, the API server's rules and the reference page."""
