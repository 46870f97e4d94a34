"""The models that a job's stages pass samples through, and how often: pure functions of the job."""

from rlhfless_operator.job.spec import RLHFJobSpec


class Passes:
    """The passes through the policy, the reference and the critic in the steps of one job."""

    def __init__(self, spec: RLHFJobSpec) -> None:
        self._spec = spec
        self._algorithm = spec.algorithm.resolved()

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self._algorithm.advantage == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether the distance to the reference policy is penalised."""
        return self._algorithm.kl is not None and self._algorithm.kl.coefficient > 0

    @property
    def prepares_log_probs(self) -> bool:
        """Whether preparation asks the policy. A distance in the reward is between two of its own passes."""
        return self.has_reference and self._algorithm.kl is not None and self._algorithm.kl.placement == "reward"

    @property
    def prepares_advantages(self) -> bool:
        """Whether preparation estimates advantages. Otherwise the learner asks its own critic: an estimate of
        preparation would be as stale as the samples."""
        return not self.has_critic or self._spec.asynchronous is None

    @property
    def preparation(self) -> int:
        """Forward passes of preparation over each sample: by the reference, the policy and the critic."""
        return self.has_reference + self.prepares_log_probs + (self.has_critic and self.prepares_advantages)

    @property
    def preparation_computes(self) -> bool:
        """True if preparation asks the policy, the reference or the critic in any step."""
        return self.preparation > 0 or self.policy_is_frozen(1)

    @property
    def learning(self) -> float:
        """Forward and backward passes of learning over each sample, on average; a forward pass alone is a third.

        If a step has several updates, it first asks the policy about every sample after the first update, and the
        critic about all samples if preparation has not.
        """
        asked = 1.0 if self._algorithm.epochs > 1 else 1 - 1 / self._spec.updates_per_step
        asked += not self.prepares_advantages
        return (1 + self.has_critic) * self._algorithm.epochs + asked / 3

    def policy_is_frozen(self, step: int) -> bool:
        """Return whether only the critic learns. Then learning passes no batch through the policy."""
        return self.has_critic and self._algorithm.critic is not None and step <= self._algorithm.critic.warmup_steps
