"""The price and the number of GPUs of each stage's instance, and the job's budget, all from the job document alone.

The machine does not matter: a document has the same prices on a laptop and on a cluster.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from rlhfless_functions.api import STAGES, Stage
from rlhfless_functions.settings import Money, PositiveMoney, Settings
from rlhfless_operator.job.pods import PodsSpec, merge_pods

if TYPE_CHECKING:
    from rlhfless_operator.job.spec import RLHFJobSpec

SPOT_LABELS: Mapping[str, str] = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-provisioning": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of spot nodes, as Karpenter and the managed Kubernetes of AWS, Google and Azure give them."""


class StagePricesSpec(Settings):
    """Price of one instance for an hour, by stage. It overrides every other price."""

    generation: Money | None = None
    """Price of a generation instance."""
    preparation: Money | None = None
    """Price of a preparation instance."""
    learning: Money | None = None
    """Price of a learning instance."""


class PricesSpec(Settings):
    """What instances cost. `stages` sets the price of a stage's instance. Without it, an instance with GPUs costs their
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
    """What the job may spend: `money`, `gpuHours` or both. Before a step that would exceed the budget, the job is
    suspended. It continues once you raise the budget."""

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


class UnknownPriceError(ValueError):
    """The document does not give the price of a stage's instances."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        """`accelerators` or `spot`."""


def instance_gpus(spec: "RLHFJobSpec") -> dict[Stage, int]:
    """GPUs of an instance of each stage."""
    if spec.rehearsal is not None:
        emulated = spec.rehearsal.gpus
        return {**dict.fromkeys(STAGES, emulated), "learning": spec.learning.processes or emulated}
    asked = {stage: _gpu_limit(_pods(spec, stage)) for stage in STAGES}
    if any(asked.values()):
        return asked
    tensor_parallel = 1 if spec.generation.engine == "transformers" else spec.generation.vllm.tensor_parallel_size
    return {"generation": tensor_parallel, "preparation": 1, "learning": spec.learning.processes or 1}


def instance_prices(spec: "RLHFJobSpec") -> dict[Stage, Decimal]:
    """Price of an instance of each stage for an hour.

    Raises:
        UnknownPriceError: accelerators have prices, but a stage's accelerator has none.
    """
    gpus = instance_gpus(spec)
    return {stage: _instance_price(spec, stage, gpus[stage]) for stage in STAGES}


def unknown_price(spec: "RLHFJobSpec", field: str) -> str | None:
    """What is wrong with a field of `prices`, and the remedy; None if nothing is wrong."""
    try:
        instance_prices(spec)
    except UnknownPriceError as error:
        return str(error) if error.field == field else None
    return None


def _instance_price(spec: "RLHFJobSpec", stage: Stage, gpus: int) -> Decimal:
    prices = spec.prices
    own: Decimal | None = getattr(prices.stages, stage)
    if own is not None:
        return own
    if not gpus or not (prices.accelerators or prices.spot):
        return prices.instance_hour
    selector = _pods(spec, stage).node_selector or {}
    name = _accelerator(spec, stage, selector)
    spot = next((f"{label}: {value}" for label, value in SPOT_LABELS.items() if selector.get(label) == value), None)
    price = (prices.accelerators if spot is None else prices.spot).get(name)
    if price is None:
        field, why = ("accelerators", "on demand") if spot is None else ("spot", f"on spot capacity ({spot})")
        raise UnknownPriceError(
            field, f"{stage} runs on {name} {why}, which has no price; add {name} here, or set prices.stages.{stage}"
        )
    return gpus * price


def _accelerator(spec: "RLHFJobSpec", stage: Stage, selector: Mapping[str, str]) -> str:
    names = list(dict.fromkeys([*spec.prices.accelerators, *spec.prices.spot]))
    if spec.rehearsal is not None and spec.rehearsal.gpu in names:
        return spec.rehearsal.gpu
    found = [name for name in names if name in selector.values()] or names
    if len(found) == 1:
        return found[0]
    place = f"{stage}.pods.nodeSelector"
    raise UnknownPriceError(
        "accelerators",
        f"nothing says which of {', '.join(found)} {stage} runs on; give one label of {place} that value, or set"
        f" prices.stages.{stage}",
    )


def _pods(spec: "RLHFJobSpec", stage: Stage) -> PodsSpec:
    own: PodsSpec = getattr(spec, stage).pods
    return merge_pods(spec.pods, own)


def _gpu_limit(pods: PodsSpec) -> int:
    limits = (pods.resources.limits if pods.resources is not None else None) or {}
    return sum(int(amount) for name, amount in limits.items() if name.endswith("/gpu") and amount.isdecimal())
