"""The warning of instances that idled for longer than it would have cost to let them go."""

from rlhfless_functions.api import STAGES
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun

_LEAST_SECONDS = 5.0
"""Seconds beyond a switch from which idling is worth a word."""


def note_idling(run: TrainingRun, journal: StepJournal, step: int) -> None:
    """Tell of each stage whose instance idled in this step for longer than an end and a start cost.

    In the first step nothing is known of later stages, and instances that the job or the platform keeps are meant to
    idle.
    """
    longest = journal.ledger.take_longest_idle()
    for stage, seconds in ((stage, longest[stage]) for stage in STAGES if stage in longest):
        switch = run.capacity.switch_seconds(stage)
        if step > 1 and seconds > switch + _LEAST_SECONDS and not run.capacity.keeps(stage):
            run.progress.note(
                f"step {step}: a {stage} instance idled for {seconds:.1f} s, and to let it go and start another would"
                f" have taken {switch:.1f} s; the step was not as forecast"
            )
