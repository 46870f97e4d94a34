"""Reading a job document and the files that it names; every fault with its field, line and remedy."""
