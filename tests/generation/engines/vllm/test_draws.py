"""Our draw in vLLM on a GPU: it waits for nothing, copies little and takes little memory.

Neither vLLM nor a GPU is needed. The meta device stands for one: its tensors have sizes and no values, and a value that
the host asks for is an error.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfless_functions.generation.engines import sampling
from rlhfless_functions.generation.engines.randomness import shifted_key, uniforms
from rlhfless_functions.generation.engines.sampling import choose
from rlhfless_functions.generation.engines.vllm.draws import END, GREEDY, KEY, CounterSampler
from rlhfless_functions.generation.engines.vllm.verification import Verifier

QWEN_VOCABULARY = 151_936


class Gpu(TorchDispatchMode):
    """Counts the bytes on the device, and the copies to it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.copies: list[tuple[int, bool]] = []
        """Numbers that each copy moves, and whether the host goes on meanwhile."""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._hold(tensor.untyped_storage())
                if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
                    self.copies.append((tensor.numel(), kwargs["non_blocking"]))
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


class Runner:
    """The part of vLLM's model runner that the draw reads."""

    def __init__(self, requests: int, *, greedy: bool = False) -> None:
        self.reads = 0
        self.drafter = SimpleNamespace(tried=None)
        self.greedy = greedy
        self.change(requests)

    def change(self, requests: int) -> None:
        """Another batch, of which vLLM makes metadata anew."""
        lengths = torch.arange(10, 10 + max(requests, 1), dtype=torch.int32)
        names = [f"{number}" for number in range(requests)]
        self.input_batch = SimpleNamespace(
            req_ids=names, num_tokens_no_spec_cpu_tensor=lengths, sampling_metadata=object()
        )
        self._arguments = {name: {KEY: shifted_key(int(name), 5), END: 1, GREEDY: self.greedy} for name in names}

    @property
    def requests(self) -> Any:
        self.reads += 1
        return {
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=given))
            for name, given in self._arguments.items()
        }


def sampled(runner: Runner, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = CounterSampler(runner)(logits, {}, None, None)
    return result


@pytest.mark.parametrize("greedy", [False, True])
def test_a_pass_reads_nothing_from_the_device_and_never_waits_for_a_copy(greedy: bool) -> None:
    with Gpu() as gpu:
        runner = Runner(256, greedy=greedy)
        tokens, log_probs = sampled(runner, torch.empty(256, 1000, device="meta"))
    assert (tokens.device.type, tuple(tokens.shape), tuple(log_probs.shape)) == ("meta", (256,), (256, 1000))
    assert all(goes_on for _, goes_on in gpu.copies)


def test_only_lengths_are_copied_until_the_batch_changes() -> None:
    with Gpu() as gpu:
        runner = Runner(256)
        draw = CounterSampler(runner)
        passes = []
        for requests in (256, 256, 256, 255, 255):
            if requests != len(runner.input_batch.req_ids):
                runner.change(requests)
            gpu.copies.clear()
            draw(torch.empty(requests, 1000, device="meta"), {}, None, None)
            passes.append([count for count, _ in gpu.copies])
    assert passes == [[256] * 3, [256], [256], [255] * 3, [255]]


def test_a_batch_of_equal_size_with_other_requests_has_other_random_numbers() -> None:
    runner, logits = Runner(64), torch.zeros(64, 1000)
    draw = CounterSampler(runner)
    first, _ = draw(logits, {}, None, None)
    runner.change(64)
    for given in runner._arguments.values():
        given[KEY] += 1
    second, _ = draw(logits, {}, None, None)
    assert (first != second).any()
    assert torch.equal(second, sampled(runner, logits)[0])


def test_sums_over_a_large_vocabulary_take_a_bounded_memory() -> None:
    """vLLM needs log-probabilities of all rows; sums in float64 of all would be three times as large again."""
    rows = 1024
    with Gpu() as gpu:
        logits = torch.empty(rows, QWEN_VOCABULARY, device="meta")
        before = gpu.bytes
        sampled(Runner(rows), logits)
        taken = gpu.peak - before
    assert taken <= rows * QWEN_VOCABULARY * 4 + sampling.SUM_BYTES + 1e6


@pytest.mark.parametrize("vocabulary", [66, 1000, 151_936])
def test_rows_that_are_summed_apart_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    torch.manual_seed(0)
    log_probs = torch.log_softmax(torch.randn(37, vocabulary) * 4, -1)
    numbers = torch.rand(37, dtype=torch.float64)
    log_probs[5] = float("nan")
    together = choose(log_probs, numbers)
    monkeypatch.setattr(sampling, "SUM_BYTES", 5 * 20 * vocabulary)
    apart = choose(log_probs, numbers)
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])
    assert apart[1].tolist() == [row != 5 for row in range(37)]


def test_a_token_depends_on_its_sample_and_its_position_alone() -> None:
    runner, logits = Runner(8), torch.randn(8, 100)
    tokens, log_probs = sampled(runner, logits)
    keys = torch.tensor([shifted_key(number, 5) for number in range(8)])
    expected, _ = choose(torch.log_softmax(logits, -1), uniforms(keys, torch.arange(10, 18)))
    assert torch.equal(tokens, expected)
    assert torch.equal(log_probs, torch.log_softmax(logits, -1))


def test_a_row_that_is_no_distribution_ends_its_sequence() -> None:
    logits = torch.zeros(4, 100)
    logits[2] = float("nan")
    for greedy in (False, True):
        assert sampled(Runner(4, greedy=greedy), logits)[0][2] == 1


def test_vllm_measures_its_memory_with_an_empty_batch() -> None:
    tokens, _ = sampled(Runner(0), torch.zeros(1, 100))
    assert 0 <= tokens.item() < 100


def test_drafts_are_verified_without_waiting_for_the_device() -> None:
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
    with Gpu() as gpu:
        runner = Runner(4)
        verifier = Verifier(runner, CounterSampler(runner))
        drafts = [3, 0, 1, 2]
        metadata = SimpleNamespace(
            num_draft_tokens=drafts,
            max_spec_len=3,
            draft_token_ids=torch.empty(sum(drafts), dtype=torch.int32, device="meta"),
        )
        temperature = SimpleNamespace(temperature=torch.empty(4, device="meta"))
        output = verifier(metadata, None, torch.empty(sum(drafts) + 4, 100, device="meta"), temperature)
    assert tuple(output.sampled_token_ids.shape) == (4, 4)
    assert all(goes_on for _, goes_on in gpu.copies)
