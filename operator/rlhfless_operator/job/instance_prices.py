"""The price of each stage's instance, from the job document and the cluster's default pods.

The machine does not matter: without such defaults a document has the same prices on a laptop and on a cluster.
"""

from collections.abc import Mapping
from decimal import Decimal

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.job.instance_gpus import instance_gpus, pods_by_stage
from rlhfless_operator.job.sections import JobFields

SPOT_LABELS: Mapping[str, str] = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-provisioning": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""Labels of spot nodes, as Karpenter and the managed Kubernetes of AWS, Google and Azure give them."""


class UnknownPriceError(ValueError):
    """The document does not give the price of a stage's instances."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        """`accelerators` or `spot`."""


def instance_prices(spec: JobFields) -> dict[Charged, Decimal]:
    """Return the price of an instance of each stage for an hour, and of an environment's pod if the job may have one.

    Raises:
        UnknownPriceError: accelerators have prices, but a stage's accelerator has none.
    """
    gpus = instance_gpus(spec)
    prices: dict[Charged, Decimal] = {stage: _instance_price(spec, stage, gpus[stage]) for stage in STAGES}
    if spec.has_environment_pods:
        own = spec.prices.stages.environment
        prices["environment"] = spec.prices.instance_hour if own is None else own
    return prices


def unknown_price(spec: JobFields, field: str) -> str | None:
    """Return the fault of a field of `prices`, with the remedy; None if there is none."""
    try:
        instance_prices(spec)
    except UnknownPriceError as error:
        return str(error) if error.field == field else None
    return None


def price_ratio(prices: Mapping[Charged, Decimal], stage: Stage) -> float:
    """Return the price of an instance of a stage in instances of generation; 1 if generation costs nothing."""
    return float(prices[stage] / prices["generation"]) if prices["generation"] else 1.0


def _instance_price(spec: JobFields, stage: Stage, gpus: int) -> Decimal:
    prices = spec.prices
    own: Decimal | None = getattr(prices.stages, stage)
    if own is not None:
        return own
    if not gpus or not (prices.accelerators or prices.spot):
        return prices.instance_hour
    selector = pods_by_stage(spec)[stage].node_selector or {}
    name = _accelerator(spec, stage, selector)
    spot = next((f"{label}: {value}" for label, value in SPOT_LABELS.items() if selector.get(label) == value), None)
    price = (prices.accelerators if spot is None else prices.spot).get(name)
    if price is None:
        field, why = ("accelerators", "on demand") if spot is None else ("spot", f"on spot capacity ({spot})")
        raise UnknownPriceError(
            field, f"{stage} runs on {name} {why}, which has no price; add {name} here, or set prices.stages.{stage}"
        )
    return gpus * price


def _accelerator(spec: JobFields, stage: Stage, selector: Mapping[str, str]) -> str:
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
