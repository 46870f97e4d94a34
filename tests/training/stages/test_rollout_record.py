"""What a step's record says of its rollouts."""

from rlhfless_operator.training.stages.rollout_record import rollout_metrics


def test_counts_of_rollouts_are_added_up_and_the_newest_says_the_rest() -> None:
    earlier = {"generation/cuts": 1.0, "generation/switches": 2.0, "generation/seconds": 9.0, "rewards/mean": 0.1}
    newest = {"generation/cuts": 3.0, "generation/switches": 4.0, "generation/seconds": 7.0, "rewards/mean": 0.2}
    assert rollout_metrics([earlier, newest], switches=True) == {
        "generation/lost_instances": 0.0,
        "generation/cuts": 4.0,
        "generation/moved_samples": 0.0,
        "generation/switches": 6.0,
        "generation/seconds": 7.0,
    }


def test_a_step_beside_which_no_rollout_ended_has_all_counts() -> None:
    always = {"generation/lost_instances": 0.0, "generation/cuts": 0.0, "generation/moved_samples": 0.0}
    switched = {"generation/switches": 0.0}
    kept = {"generation/kept_responses": 0.0, "generation/kept_tokens": 0.0}
    assert rollout_metrics([]) == always
    assert rollout_metrics([], switches=True) == {**always, **switched}
    assert rollout_metrics([], switches=True, kept=True) == {**always, **switched, **kept}
