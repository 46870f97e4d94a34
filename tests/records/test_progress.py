"""What is going on right now."""

from rlhfless_operator.records.progress import LiveProgress


def test_one_stage_after_the_other() -> None:
    progress = LiveProgress()
    progress.stage("generation", step=1)
    progress.stage("preparation", step=1)
    assert progress.stages == [("preparation", 1)]
    progress.over("generation", 1)
    assert progress.stages == []
    progress.stage("learning", step=1)
    assert (progress.stages, progress.at_once, progress.stage_name) == ([("learning", 1)], "", "learning")


def test_rollouts_and_the_learner_beside_each_other() -> None:
    told: list[str] = []
    progress = LiveProgress()
    progress.on_stage = lambda: told.append(progress.at_once)
    progress.stage("generation", step=3)
    progress.stage("learning", step=2)
    progress.stage("generation", step=4)
    progress.stage("preparation", step=3)
    assert progress.stages == [("generation", 4), ("preparation", 3), ("learning", 2)]
    progress.over("generation", 3)
    progress.over("learning", 2)
    assert told == [
        "",
        "generation 3 · learning 2",
        "generation 3 · generation 4 · learning 2",
        "generation 4 · preparation 3 · learning 2",
        "generation 4 · learning 2",
        "",
    ]
    assert progress.stage_name == "generation", "what is left"
