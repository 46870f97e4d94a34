"""The limit on samples that no reward could score. Past it a job would train on a remnant, or on nothing at all."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhfless_operator.training.requests.tasks import StageFailedError

if TYPE_CHECKING:
    from rlhfless_functions.settings import RewardSettings


class UnscorableError(StageFailedError):
    """More samples than `limits.unscorable` allows could not be scored."""


def check_unscorable(sums: Mapping[str, float], rewards: Sequence["RewardSettings"], limit: float, what: str) -> None:
    """Return if enough of the samples were scored.

    Args:
        sums: metrics of all their chunks, added up.
        rewards: of the job.
        limit: the largest share that may be unscorable.
        what: the origin of the samples, such as `step 3`.

    Raises:
        UnscorableError: more than that are; the message says what to do.
    """
    unscorable = sums.get("reward/unscorable/count", 0.0)
    samples = unscorable + sums.get("reward/count", 0.0)
    if unscorable <= limit * samples:
        return
    by_reward = ", ".join(_account(sums, reward) for reward in rewards if reward.weight != 0)
    raise UnscorableError(
        f"{what}: no reward scored {unscorable:.0f} of {samples:.0f} samples, a share of {unscorable / samples:.2f},"
        f" which is more than limits.unscorable, {limit:g} ({by_reward}); mend the rewards or the data,"
        " add a reward that scores what these leave out, or raise limits.unscorable"
    )


def _account(sums: Mapping[str, float], reward: "RewardSettings") -> str:
    stem = f"reward/{reward.name}"
    account = f"{reward.name!r} left {sums.get(f'{stem}/unscorable/count', 0.0):.0f} unscored"
    errors = sums.get(f"{stem}/errors/count", 0.0)
    return f"{account}, having failed for {errors:.0f} groups" if errors else account
