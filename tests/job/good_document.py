"""A job document that has some of everything, and what is wrong with changed ones."""

from pathlib import Path

import pytest

from rlhfless_operator.job.reading.validation import Fault, InvalidJobError, parse_job

GOOD = """\
apiVersion: rlhfless.io/v1alpha1
kind: RLHFJob
metadata:
  name: job
  labels: {team: a}
spec:
  model:
    source: org/model
    lora: {rank: 8, targetModules: [q_proj]}
  algorithm:
    name: ppo
    clipLow: 0.1
    kl: {coefficient: 0.01, placement: reward, estimator: k1}
    critic: {learningRate: 1e-5, valueClip: null}
    importanceSampling:
      high: 2
  rewards:
    - name: right
      math: {}
      timeout: 30s
    - name: short
      weight: -0.5
      length: {bufferTokens: 16}
      memory: 512Mi
  data: {source: data.jsonl, promptColumn: question}
  sampling: {maxResponseTokens: 64, stop: ["\\n\\n"]}
  batch: {promptsPerStep: 8, samplesPerPrompt: 4, minibatchSamples: 16}
  optimizer: {learningRate: 1e-6, schedule: cosine}
  steps: 10
  generation:
    instances: {min: 1, max: 4}
    keepAlive: 0s
  planning: {lambda: 0.25}
  prices: {instanceHour: "2.50", currency: EUR}
  evaluation:
    data: {source: held-out.jsonl}
  checkpoints: {best: true}
  tracking:
    wandb: {project: p, mode: offline}
  limits: {stall: 1m30s}
"""


def faults(text: str, base: Path | None = None) -> list[Fault]:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text, base=base)
    return caught.value.faults


def only(text: str) -> Fault:
    (fault,) = faults(text)
    return fault
