"""`python -m rlhfless_operator` is `rlhfless`."""

from rlhfless_operator.cli import main

main()
