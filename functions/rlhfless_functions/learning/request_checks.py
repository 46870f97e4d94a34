"""Checks of a learning request before anything is loaded."""

import torch

from rlhfless_functions.api import LearnRequest
from rlhfless_functions.runtime.task import TaskError


def processes(request: LearnRequest) -> int:
    """Return the number of ranks of this instance."""
    gpus = torch.cuda.device_count()
    processes = request.learning.processes or max(1, gpus)
    if 0 < gpus < processes:
        raise TaskError(
            "bad_request",
            f"learning.processes is {processes}, but the instance has {gpus} GPUs; lower it, or give the learning pods"
            " more",
        )
    return processes


def check_steps(request: LearnRequest) -> int:
    """Return the step to take, after checking that checkpoint, replay and base lead up to it."""
    step = request.batch.step
    begin = request.checkpoint_step if request.checkpoint is not None else 0
    if [begin + 1 + i for i in range(len(request.replay) + 1)] != [*(batch.step for batch in request.replay), step]:
        raise TaskError(
            "bad_request",
            f"replay: the batches of steps {[batch.step for batch in request.replay]} do not lead from checkpoint_step"
            f" {begin} to batch step {step}; name every step between them, in order",
        )
    if request.base.version != step - 1:
        raise TaskError("bad_request", f"base: step {step} does not start from version {request.base.version}")
    ranks = processes(request) * (request.gang.size if request.gang is not None else 1)
    if request.optimizer.name == "muon" and ranks > 1:
        raise TaskError(
            "bad_request",
            "optimizer.name: muon needs whole matrices, but each of several learning processes holds parts of them;"
            " write adamw, or set learning.processes to 1 and learning.instances.max to 1",
        )
    if (request.algorithm.advantage == "gae") != (request.publish_critic is not None):
        raise TaskError("bad_request", "publish_critic: must be set with algorithm.advantage gae, and with no other")
    return step


def check_pieces(request: LearnRequest) -> None:
    """Refuse an empty batch, and pieces if the update needs the whole batch before its first gradient."""
    if not (request.batch.samples if request.following is None else request.batch.size):
        raise TaskError("bad_request", "batch.samples: a step learns from at least one sample")
    if not request.batch.pieces and request.following is None:
        return
    size = request.batch_settings.minibatch_samples
    if request.algorithm.epochs > 1 or (size is not None and size < request.batch.size):
        raise TaskError(
            "bad_request", "batch.pieces: a step with pieces must be one optimizer update; remove the pieces"
        )
    if request.algorithm.normalizes_batch:
        normalization = request.algorithm.advantage_normalization
        raise TaskError(
            "bad_request",
            f"batch.pieces: algorithm.advantageNormalization {normalization} needs the whole batch; remove the pieces",
        )
