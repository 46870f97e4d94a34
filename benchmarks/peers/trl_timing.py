"""A stopwatch at the stages of TRL's GRPOTrainer."""

import time
from typing import Any

import trl
from transformers import TrainerCallback

from benchmarks.gpu.accelerator import now


class StageTimer(TrainerCallback):
    """Seconds of each step, and of its stages; and the CPU's, which say more on a machine that others use too.

    Args:
        updates_per_step: optimizer updates of what is called a step here.
    """

    def __init__(self, updates_per_step: int) -> None:
        self._updates_per_step = updates_per_step
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.preparation: list[float] = []
        self.cpu: list[float] = []
        self._began = 0.0
        self._began_cpu = 0.0

    @property
    def learning(self) -> list[float]:
        """What of each step was neither generation nor preparation."""
        stages = zip(self.steps, self.generation, self.preparation, strict=True)
        return [step - generation - preparation for step, generation, preparation in stages]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first step begins."""
        self._began = now()
        self._began_cpu = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer update is done; the last of a step ends it."""
        if state.global_step % self._updates_per_step == 0:
            ended, ended_cpu = now(), time.process_time()
            self.steps.append(ended - self._began)
            self.cpu.append(ended_cpu - self._began_cpu)
            self._began, self._began_cpu = ended, ended_cpu


class TimedTrainer(trl.GRPOTrainer):
    """TRL's trainer, with a stopwatch at the two methods that its stages are."""

    timer: StageTimer

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = now()
        result = super()._generate(*args, **kwargs)
        self.timer.generation.append(now() - began)
        return result

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        began = now()
        result = super()._generate_and_score_completions(*args, **kwargs)
        self.timer.preparation.append(now() - began - self.timer.generation[-1])
        return result
