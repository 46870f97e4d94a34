"""The options whose results depend on the moment at which something arrives."""

from rlhfless_operator.job.spec import RLHFJobSpec


def depends_on_timing(spec: RLHFJobSpec) -> list[str]:
    """Return a sentence for each option with which two runs of the same job differ."""
    found = []
    if spec.may_learn_in_pieces and spec.asynchronous is None:
        found.append(
            "spec.learning.overlap: auto — the last bits of the weights depend on the order in which groups arrive;"
            " each run writes it down, and rlhfless replay follows it; with never they depend on no timing"
        )
    if spec.asynchronous is not None:
        found.append(
            "spec.async — what samples a step depends on when weights are published; each run writes it down, and"
            " rlhfless replay reproduces it"
        )
    return found
