"""How samples are expected to act: as those of their prompt did, or as all did for each token."""

from rlhfless_operator.planner.acting import NO_ACTING, Acting, ActingPredictor


def predictor(away: float = 0.5, given: float = 2.0) -> ActingPredictor:
    return ActingPredictor(lambda: Acting(away, given))


def test_a_prompt_that_was_never_seen_acts_in_proportion_to_its_tokens() -> None:
    assert predictor().predict(3, 100.0) == Acting(50.0, 200.0)
    assert ActingPredictor(lambda: NO_ACTING).predict(3, 100.0) == Acting(), "without an environment nothing is away"


def test_the_newest_visit_counts_half() -> None:
    found = predictor()
    found.observe({(3, 0): Acting(10.0, 4.0), (3, 1): Acting(30.0, 8.0), (5, 0): Acting(1.0, 1.0)})
    assert found.predict(3, 100.0) == Acting(20.0, 6.0)
    found.observe({(3, 0): Acting(40.0, 6.0)})
    assert found.predict(3, 100.0) == Acting(30.0, 6.0)
    assert found.predict(5, 100.0) == Acting(1.0, 1.0)


def test_rows_of_another_dataset_are_not_taken_for_training_prompts() -> None:
    found = predictor()
    found.observe({(3, 0): Acting(10.0, 4.0)})
    assert found.predict(3, 100.0, known=False) == Acting(50.0, 200.0)


def test_it_goes_on_from_a_checkpoint() -> None:
    found, again = predictor(), predictor()
    found.observe({(3, 0): Acting(10.0, 4.0), (4, 0): Acting(2.5, 0.0)})
    again.restore(found.state())
    assert again.state() == found.state() == [[3, 10.0, 4.0], [4, 2.5, 0.0]]
