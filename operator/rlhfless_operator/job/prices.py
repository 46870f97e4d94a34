"""The prices of instances and the budget of a job: `prices` and `budget`."""

from decimal import Decimal
from typing import Self

from pydantic import Field, model_validator

from rlhfless_functions.settings import Money, PositiveMoney, Settings


class StagePricesSpec(Settings):
    """Price of one instance for an hour, by stage. It overrides every other price."""

    generation: Money | None = None
    """Price of a generation instance."""
    preparation: Money | None = None
    """Price of a preparation instance."""
    learning: Money | None = None
    """Price of a learning instance."""
    environment: Money | None = None
    """Price of a server of the environment that the job runs."""


class PricesSpec(Settings):
    """Prices of instances. `stages` sets the price of a stage's instance. Without it, an instance with GPUs costs their
    number times the price of its accelerator, if accelerators have prices. All other instances cost `instanceHour`.
    `budget.gpuHours` explains how many GPUs an instance has."""

    instance_hour: Money = Decimal(0)
    """Price of one instance for an hour, unless a field below sets another."""
    stages: StagePricesSpec = StagePricesSpec()
    """Price of one instance for an hour, by stage."""
    accelerators: dict[str, Money] = Field(default={})
    """Price of one accelerator for an hour, by name. A stage uses the accelerator whose name is a value in its
    `pods.nodeSelector`, such as `NVIDIA-H100-80GB-HBM3` of the label `nvidia.com/gpu.product`. A rehearsal uses
    `rehearsal.gpu`. If only one name has a price, stages use that one."""
    spot: dict[str, Money] = Field(default={})
    """The same on spot capacity. A stage runs on spot capacity if its `pods.nodeSelector` has a label with which
    Karpenter, EKS, GKE or AKS mark spot nodes, such as `karpenter.sh/capacity-type: spot`."""
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    """Currency of the prices, as an ISO 4217 code."""

    @property
    def given(self) -> bool:
        """Whether there is any price."""
        stages = self.stages.model_dump(exclude_none=True)
        return self.instance_hour > 0 or bool(stages or self.accelerators or self.spot)


class BudgetSpec(Settings):
    """Most that the job may spend: `money`, `gpuHours` or both. Before a step that would exceed the budget, the job is
    suspended, and also in the middle of a step that has. It continues once you raise the budget."""

    money: PositiveMoney | None = None
    """Most money, in the currency of `prices`."""
    gpu_hours: float | None = Field(default=None, gt=0)
    """Most GPU-hours: the charged hours of each instance, times its GPUs. An instance has the GPUs in its pods' limits.
    If no stage sets such a limit, generation has `vllm.tensorParallelSize` GPUs, learning has `processes`, and
    preparation has 1."""

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.money is None and self.gpu_hours is None:
            raise ValueError("the budget is empty; write money, gpuHours or both")
        return self
