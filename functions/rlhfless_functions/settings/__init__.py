"""The settings of a job that the control plane and the functions share. This package does not import torch.

- `base`: the base of all settings, and the types with a unit.
- `model`: the model to train. `data`: the source of prompts. `sampling`: temperature and limits.
- `algorithm`: the algorithm and its choices. `rewards`: the weighted rewards.
- `environment`: what samples act in.
- `optimizer`: the optimizer and the batch. `learning`: the learner's memory. `engine`: the inference engine.
- `emulation`: an emulated GPU.
"""

from rlhfless_functions.settings.algorithm import (
    AlgorithmName,
    AlgorithmSettings,
    CriticSettings,
    ImportanceSamplingSettings,
    KlSettings,
    RejectionSettings,
)
from rlhfless_functions.settings.base import (
    EXPERIMENTAL,
    Bytes,
    Duration,
    DurationOrZero,
    Experimental,
    Money,
    PositiveMoney,
    Settings,
)
from rlhfless_functions.settings.data import DataSettings, MixedSource, RowFunction, SourceSettings
from rlhfless_functions.settings.engine import EngineName, EngineSettings, VllmSettings
from rlhfless_functions.settings.environment import (
    EnvironmentSettings,
    OpenEnvEnvironment,
    PythonEnvironment,
    ServedEnvironment,
)
from rlhfless_functions.settings.learning import LearningSettings
from rlhfless_functions.settings.model import LoraSettings, ModelSettings
from rlhfless_functions.settings.optimizer import BatchSettings, OptimizerSettings
from rlhfless_functions.settings.rewards import (
    CodeReward,
    EnvironmentReward,
    ExactMatchReward,
    FormatReward,
    HttpReward,
    LengthReward,
    MathReward,
    ModelReward,
    PythonReward,
    RewardSettings,
)
from rlhfless_functions.settings.sampling import EngineSampling, SamplingSettings
