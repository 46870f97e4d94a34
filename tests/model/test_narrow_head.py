"""The head with bfloat16 products: near the exact formula, each row of the weight's gradient written once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.learner.head_accuracy import errors
from rlhfless_functions.model import output_head
from rlhfless_functions.model.logit_form import LogitForm
from rlhfless_functions.model.narrow_head import NarrowTokenLogProbs, chunk_logits
from rlhfless_functions.model.output_head import multiplies_narrow, token_log_probs
from tests.model.test_output_head import HEADS, TOKENS, VOCABULARY, build, by_the_book, inputs

torch.set_num_threads(1)

FORM = LogitForm(1.0, None)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU compute as a GPU does."""
    monkeypatch.setattr(output_head, "multiplies_narrow", lambda hidden: True)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("chunk_tokens", [None, 1])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_numbers_and_gradients_are_those_of_the_formula_with_rounded_factors(
    name: str, entropy_gradient: bool, chunk_tokens: int | None
) -> None:
    model, temperature = build(name), 0.7
    head = model.get_output_embeddings()
    head.weight.data = head.weight.data.bfloat16().float()
    weights = torch.linspace(-1, 1, TOKENS)
    hidden, ids = inputs()
    hidden = hidden.detach().bfloat16().float().requires_grad_()
    of = [hidden, *head.parameters()]

    every = by_the_book(model, hidden, temperature)
    expected = every.gather(1, ids[:, None]).squeeze(1)
    expected_entropy = -(every.exp() * every).sum(-1)
    loss = (expected * weights).sum() + (expected_entropy * weights.square()).sum() * entropy_gradient
    expected_gradients = torch.autograd.grad(loss, of)

    log_probs, entropy = token_log_probs(
        model, hidden, ids, temperature, entropy=True, entropy_gradient=entropy_gradient, chunk_tokens=chunk_tokens
    )
    assert entropy is not None
    assert entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    loss = (log_probs * weights).sum()
    if entropy_gradient:
        loss = loss + (entropy * weights.square()).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, of), expected_gradients, strict=True):
        # Each factor of a sum is rounded to eight bits.
        assert (ours - theirs).norm() < 4e-3 * theirs.norm()


def test_it_is_nearer_to_float64_than_rounded_logits_are() -> None:
    ways = errors(4000, 128, tokens=32)
    ours, theirs = ways["bfloat16, ours on a GPU"], ways["bfloat16, as TRL and verl"]
    assert all(ours[quantity] < theirs[quantity] for quantity in ours)
    assert max(ways["float32"].values()) < 1e-5


@pytest.mark.usefixtures("narrow")
def test_without_tokens_there_is_nothing_and_no_error() -> None:
    model = build()
    hidden, ids = inputs()
    log_probs, _ = token_log_probs(model, hidden[:0], ids[:0], 1.0, entropy=True)
    log_probs.sum().backward()
    assert not model.get_output_embeddings().weight.grad.any()


@pytest.mark.usefixtures("narrow")
def test_a_frozen_head_passes_a_gradient_on_in_the_format_of_the_states() -> None:
    model = build().to(torch.bfloat16).requires_grad_(False)
    hidden = inputs()[0].detach().bfloat16().requires_grad_()
    log_probs, _ = token_log_probs(model, hidden, inputs()[1], 1.0)
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


class Recorded(TorchDispatchMode):
    """Keeps each operation, with the shapes and formats of what it gets and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [(tuple(each.shape), each.dtype) for each in args if isinstance(each, torch.Tensor)]
        self.calls.append((str(func), given, result))
        return result


def context(**given: Any) -> Any:
    saved: list[Any] = []
    return SimpleNamespace(
        save_for_backward=lambda *tensors: saved.extend(tensors),
        mark_non_differentiable=lambda *tensors: None,
        needs_input_grad=[True, True, False],
        saved_tensors=saved,
        **given,
    )


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_gpu_multiplies_bfloat16_and_writes_each_row_of_the_weight_s_gradient_once(weights: torch.dtype) -> None:
    tokens, vocabulary, width, logits = 40, 3000, 8, 4000

    # Tensors without content take the way of a GPU's.
    hidden = torch.empty(tokens, width, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(vocabulary, width, device="meta", dtype=weights)
    ids = torch.zeros(tokens, device="meta", dtype=torch.long)
    made = context()
    with Recorded() as recorded:
        log_probs, _ = NarrowTokenLogProbs.forward(made, hidden, weight, None, ids, FORM, 1.0, logits, True, False)
        NarrowTokenLogProbs.backward(made, torch.ones_like(log_probs), None)
    calls = recorded.calls
    products = [call for call in calls if "mm" in call[0]]
    assert {name for name, _, _ in products} == {"aten.mm.dtype"}
    assert {dtype for _, given, _ in products for _, dtype in given} == {torch.bfloat16}
    assert {result.dtype for _, _, result in products} == {torch.float32}
    parts = [given for name, given, _ in calls if name == "aten.copy_.default" and given[0][0][1:] == (width,)]
    assert sum(shape[0] for (shape, _), *_ in parts) == vocabulary
    assert not any(given and given[0][0] == (vocabulary, width) for name, given, _ in calls if "add" in name)
    largest = max(
        result.numel()
        for _, _, result in calls
        if isinstance(result, torch.Tensor) and result.shape != (vocabulary, width)
    )
    assert largest <= max(logits, vocabulary * width)
    assert "_local_scalar_dense" not in str(calls), "nothing waits for the device"


def test_a_gpu_in_bfloat16_alone_multiplies_so() -> None:
    assert not multiplies_narrow(torch.empty(1, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert not multiplies_narrow(torch.empty(1))
    with FakeTensorMode():
        assert multiplies_narrow(torch.empty(1, device="cuda", dtype=torch.bfloat16))
        assert not multiplies_narrow(torch.empty(1, device="cuda"))


def test_a_chunk_of_logits_follows_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    found = chunk_logits(torch.device("cuda", 0))
    assert found is not None
    assert 2000 < found // 152_000 < 2500, "tokens of a Qwen model; 110 before"
    assert chunk_logits(torch.device("cpu")) is None


def test_there_are_as_many_logits_at_once_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    scores = LogitForm.scores
    monkeypatch.setattr(LogitForm, "scores", lambda *given: made.append(given[1].numel()) or scores(*given))
    hidden, ids = inputs()
    weight = torch.randn(VOCABULARY, hidden.shape[1], requires_grad=True)
    log_probs, _ = NarrowTokenLogProbs.apply(hidden, weight, None, ids, FORM, 1.0, 120, True, False)
    log_probs.sum().backward()
    assert max(made) <= 120
    assert sum(made) == 2 * TOKENS * VOCABULARY


def test_entropies_are_not_rounded_where_layers_compute_in_bfloat16() -> None:
    hidden, ids = inputs()
    weight = torch.randn(VOCABULARY, hidden.shape[1])
    given = (hidden, weight, None, ids, FORM, 1.0, 120, True, False)
    _, exact = NarrowTokenLogProbs.apply(*given)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropies = NarrowTokenLogProbs.apply(*given)
    assert torch.equal(entropies, exact)
