"""What a driver knows of a job's data, and where it stands in it."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.data.prompts import Prompts
from tests.jobs import job


def prompts_of(folder: Path, count: int, index: dict[str, object] | None = None, **spec: object) -> Prompts:
    made = job(**{"batch": {"promptsPerStep": 4}, "steps": None, **spec}).spec
    where = JobFolder(str(folder))
    content = {"lengths": list(range(count)), "counts": {"rows": count}, "prefixes": None, **(index or {})}
    artifacts.write_json(artifacts.join(where.data("training"), "index.json"), content)
    return Prompts(made, where)


def test_before_the_data_is_opened_nothing_is_known(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, 10, steps=3)
    assert (prompts.count, prompts.total_steps) == (0, 0)


@pytest.mark.parametrize(("spec", "steps"), [({"steps": 7}, 7), ({"epochs": 3}, 8), ({"epochs": 2}, 5)])
def test_the_steps_are_the_documents_or_as_many_as_its_epochs_need(
    tmp_path: Path, spec: dict[str, object], steps: int
) -> None:
    prompts = prompts_of(tmp_path, 10, **spec)
    prompts.open_training()
    assert (prompts.count, prompts.total_steps) == (10, steps)
    assert list(prompts.tokens("training")) == list(range(10))


def test_too_few_prompts_for_a_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.source has 3 usable prompts, fewer than batch\.promptsPerStep, 4"):
        prompts_of(tmp_path, 3, steps=1).open_training()


def test_to_look_at_the_next_prompts_draws_none(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, 10, steps=3)
    prompts.open_training()
    ahead = prompts.next(4)
    assert prompts.cursor.draw(4) == ahead


def test_a_later_driver_stands_where_the_position_says(tmp_path: Path) -> None:
    prompts, later = (prompts_of(tmp_path, 10, steps=3) for _ in range(2))
    for each in (prompts, later):
        each.open_training()
    prompts.cursor.draw(4)
    later.go_to(prompts.cursor.state())
    assert later.cursor.draw(4) == prompts.cursor.draw(4)


def test_the_data_tells_which_prefixes_its_prompts_share(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, 10, steps=3)
    prompts.open_training()
    assert prompts.prefix_tree("training") is None
    tree = {"block_tokens": 16}
    prompts = prompts_of(tmp_path, 10, {"prefixes": tree}, steps=3)
    prompts.open_training()
    assert prompts.prefix_tree("training") == tree


@pytest.mark.parametrize(
    ("spec", "total", "epochs"), [({"steps": 7}, 7, 3), ({"epochs": 3}, 8, 3), ({"steps": 1}, 1, 1)]
)
def test_rewards_see_the_position_as_trl_counts_it(
    tmp_path: Path, spec: dict[str, object], total: int, epochs: int
) -> None:
    prompts = prompts_of(tmp_path, 10, **spec)
    prompts.open_training()
    first, last = prompts.progress(1, "training"), prompts.progress(total, "training")
    assert (first.finished, first.total, first.epoch, first.epochs) == (0, total, 0.0, epochs)
    assert (last.finished, last.epoch) == (total - 1, pytest.approx((total - 1) * 0.4))
    # An evaluation after a step sees the step as finished.
    assert prompts.progress(total, "evaluation").finished == total


def test_epochs_that_replaced_groups_use_up_end_the_job_early(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, 10, epochs=2, algorithm={"name": "dapo"})
    prompts.open_training()
    assert (prompts.left, prompts.planned_steps) == (20, 5)
    prompts.cursor.draw(4)
    prompts.cursor.draw(9)
    assert (prompts.left, prompts.passes, prompts.settle(1), prompts.total_steps) == (7, 1.3, None, 5)
    prompts.cursor.draw(8)
    said = "step 2 of 5 planned is the last: it draws the last prompts of epochs: 2, because groups that taught nothing"
    assert prompts.left == 0
    assert (prompts.settle(2) or "").startswith(said)
    assert (prompts.total_steps, prompts.planned_steps) == (2, 5)
    assert (prompts.progress(2, "training").total, prompts.progress(2, "training").epochs) == (5, 2)


@pytest.mark.parametrize(
    "spec",
    [
        {"steps": 5, "algorithm": {"name": "dapo"}},
        {"epochs": 2},
        {"epochs": 2, "algorithm": {"name": "dapo", "dynamicSamplingRounds": 0}},
    ],
)
def test_other_jobs_take_the_steps_that_they_plan_however_far_they_draw_ahead(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    prompts = prompts_of(tmp_path, 10, **spec)
    prompts.open_training()
    for _ in range(5):
        prompts.cursor.draw(10)
    assert (prompts.left, prompts.settle(1), prompts.total_steps) == (None, None, 5)
