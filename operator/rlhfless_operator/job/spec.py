"""The job document: one pydantic model, from which validation, the CRD and the reference page are made.

The functions' settings hold the numbers of the work itself (model, algorithm, rewards, data, sampling, batch,
optimizer), and `sections.py` the fields that only the control plane reads. This module adds the rules between fields.
"""

from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhfless_functions.api import Stage
from rlhfless_functions.settings import DataSettings, RewardSettings, Settings, SourceSettings
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.job.instance_gpus import instance_gpus
from rlhfless_operator.job.instance_prices import instance_prices
from rlhfless_operator.job.paths import resolve_chat_template, resolve_file, resolve_model
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.rule import Violation
from rlhfless_operator.job.rules import SPEC_RULES
from rlhfless_operator.job.sections import EnvironmentSpec, JobFields

API_VERSION = "rlhfless.io/v1alpha1"
KIND = "RLHFJob"


class RLHFJobSpec(JobFields):
    """The model, the data, the algorithm and the limits of the training."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        violations = [
            Violation(rule.field, rule.reads, message)
            for rule in SPEC_RULES
            if (message := rule.check(self)) is not None
        ]
        if violations:
            text = "; ".join(f"{violation.field}: {violation.message}" for violation in violations)
            raise PydanticCustomError("rules", "{text}", {"text": text, "violations": violations})
        return self

    @property
    def instance_prices(self) -> dict[Charged, Decimal]:
        """Price of an instance of each stage for an hour, in the currency of the prices, and of the environment's
        servers if the job runs them."""
        return instance_prices(self)

    @property
    def instance_gpus(self) -> dict[Stage, int]:
        """GPUs of an instance of each stage, with the default pods of the cluster where the job runs."""
        return instance_gpus(self)


class JobMetadata(Settings):
    """The job's name and Kubernetes metadata."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=53)
    """Name of the job and of its folder: lower-case letters, digits and hyphens, at most 53 characters."""
    namespace: str | None = None
    """Namespace of the resource; `rlhfless run` ignores it."""
    labels: dict[str, str] | None = None
    """Labels of the resource; `rlhfless run` ignores them."""
    annotations: dict[str, str] | None = None
    """Annotations of the resource; `rlhfless run` ignores them."""


class RLHFJob(Settings):
    """One training run. The same document goes to `rlhfless run` and to `kubectl apply`."""

    api_version: Literal["rlhfless.io/v1alpha1"]
    """Version of this document's format."""
    kind: Literal["RLHFJob"]
    """Kind of this document."""
    metadata: JobMetadata
    """The job's name."""
    spec: RLHFJobSpec
    """The model, the data, the algorithm and the limits of the training."""

    def on_cluster(self, default_pods: PodsSpec) -> Self:
        """Return a copy whose pods begin with a cluster's defaults. The document stays the same."""
        return self.model_copy(update={"spec": self.spec.with_default_pods(default_pods)})

    def resolve_paths(self, base: Path) -> Self:
        """Return a copy of the job whose relative local paths are absolute.

        Args:
            base: folder of the job file. `artifacts.uri` stays as it is: it is relative to the working directory.
        """
        spec = self.spec
        model = spec.model.model_copy(
            update={
                "source": resolve_model(spec.model.source, base),
                "tokenizer": spec.model.tokenizer and resolve_model(spec.model.tokenizer, base),
                "chat_template": spec.model.chat_template and resolve_chat_template(spec.model.chat_template, base),
            }
        )
        evaluation = spec.evaluation and spec.evaluation.model_copy(
            update={
                "data": _resolve_data(spec.evaluation.data, base),
                "rewards": spec.evaluation.rewards
                and [_resolve_reward(reward, base) for reward in spec.evaluation.rewards],
            }
        )
        update = {
            "model": model,
            "data": _resolve_data(spec.data, base),
            "rewards": [_resolve_reward(reward, base) for reward in spec.rewards],
            "evaluation": evaluation,
            "environment": spec.environment and _resolve_environment(spec.environment, base),
            "rehearsal": spec.rehearsal and spec.rehearsal.resolve_paths(base),
        }
        return self.model_copy(update={"spec": spec.model_copy(update=update)})


def _resolve_data(data: DataSettings, base: Path) -> DataSettings:
    sources = data.sources and [each.model_copy(update=_resolved(each, base)) for each in data.sources]
    return data.model_copy(update={**_resolved(data, base), "sources": sources})


def _resolved(source: SourceSettings, base: Path) -> dict[str, Any]:
    functions = {
        name: function.model_copy(update={"file": resolve_file(function.file, base)})
        for name, function in (("map", source.map), ("filter", source.filter))
        if function is not None
    }
    return functions if source.source is None else {"source": resolve_file(source.source, base), **functions}


def _resolve_environment(environment: EnvironmentSpec, base: Path) -> EnvironmentSpec:
    python = environment.python
    tools = [tool.rpartition(":") for tool in environment.tools]
    return environment.model_copy(
        update={
            "python": python and python.model_copy(update={"file": resolve_file(python.file, base)}),
            "tools": [f"{resolve_file(file, base)}:{function}" for file, _, function in tools],
        }
    )


def _resolve_reward(reward: RewardSettings, base: Path) -> RewardSettings:
    if reward.python is not None:
        python = reward.python.model_copy(update={"file": resolve_file(reward.python.file, base)})
        return reward.model_copy(update={"python": python})
    if reward.model is not None:
        model = reward.model.model_copy(update={"source": resolve_model(reward.model.source, base)})
        return reward.model_copy(update={"model": model})
    return reward
