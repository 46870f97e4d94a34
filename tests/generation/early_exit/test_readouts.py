"""Read-outs of known responses: what each layer would have drawn, by the numbers that the response was drawn with."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhfless_functions.generation.early_exit import readouts
from rlhfless_functions.generation.early_exit.layers import ExitLayers, find_layers
from rlhfless_functions.generation.early_exit.readouts import DrawnResponse, Readouts, read_out
from rlhfless_functions.generation.engines.randomness import signed_keys, uniforms
from rlhfless_functions.generation.engines.sampling import draw
from tests.generation.early_exit.models import ALL, deep, idle_behind, model_of


@torch.no_grad()
def drawn_by(model: PreTrainedModel, temperature: float, count: int = 5) -> list[DrawnResponse]:
    """Responses of several lengths, a token at a time and without a cache."""
    found = []
    for number in range(count):
        prompt = [2 + (7 * number + place) % 60 for place in range(1 + 3 * number)]
        response: list[int] = []
        for position in range(3 + 4 * number):
            logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, -1:]
            noise = uniforms(torch.tensor(signed_keys([number])), torch.tensor([position]))
            response.append(int(draw(logits, temperature, noise)[0]))
        found.append(DrawnResponse(prompt, response, number))
    return found


def same(some: Readouts, others: Readouts) -> None:
    assert np.array_equal(some.drawn, others.drawn)
    assert np.array_equal(some.greedy, others.greedy)
    np.testing.assert_allclose(some.probability, others.probability, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["qwen3", "gemma 2, no cap on attention", "gemma 3", "mistral", "gpt 2"])
@torch.no_grad()
def test_read_outs_are_what_transformers_hidden_states_say(family: str, temperature: float) -> None:
    model = model_of(ALL[family])
    exits = find_layers(model, family)
    responses = drawn_by(model, temperature)
    found = read_out(exits, responses, temperature)
    at = 0
    for each in responses:
        ids, length = torch.tensor([[*each.prompt, *each.response[:-1]]]), len(each.response)
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        noise = uniforms(torch.tensor(signed_keys([each.seed])).expand(length), torch.arange(length))
        for layer in (0, 1):
            last = layer == 1
            hidden = states[layer + 1][0, -length:]
            logits = model(input_ids=ids, use_cache=False).logits[0, -length:] if last else exits.logits(hidden)
            tokens, _, _ = draw(logits, temperature, noise)
            expected = torch.tensor(each.response)
            place = slice(at, at + length)
            assert np.array_equal(found.drawn[layer, place], (tokens == expected).numpy())
            assert np.array_equal(found.likeliest[layer, place], (logits.argmax(-1) == expected).numpy())
            probabilities = torch.softmax(logits / (temperature or 1.0), -1)
            taken = probabilities.gather(1, expected[:, None])[:, 0]
            np.testing.assert_allclose(found.probability[layer, place], taken, atol=1e-5)
            np.testing.assert_allclose(found.confidence[layer, place], probabilities.max(-1).values, atol=1e-5)
        at += length
    assert found.drawn[-1].all()
    assert found.greedy[-1].all()
    assert found.drawn.shape == (2, at)
    assert 0 < found.drawn[0].mean() < 1 or temperature == 0


def test_it_does_not_matter_what_passes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(deep())
    exits = find_layers(model, "deep")
    responses = drawn_by(model, 1.0)
    together = read_out(exits, responses, 1.0)
    monkeypatch.setattr(readouts, "PASS_TOKENS", 1)
    same(read_out(exits, responses, 1.0), together)


def test_logits_of_one_layer_and_a_chunk_of_tokens_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(deep())
    exits = find_layers(model, "deep")
    responses = drawn_by(model, 1.0)
    whole = read_out(exits, responses, 1.0)
    sizes = []

    def counted(self: ExitLayers, hidden: torch.Tensor, logits=ExitLayers.logits) -> torch.Tensor:  # type: ignore[no-untyped-def]
        found = logits(self, hidden)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(ExitLayers, "logits", counted)
    monkeypatch.setattr(readouts, "CHUNK_LOGITS", 5 * model.config.vocab_size)
    same(read_out(exits, responses, 1.0), whole)
    assert max(sizes) == 5 * model.config.vocab_size
    assert sum(sizes) == 4 * sum(whole.lengths) * model.config.vocab_size


def test_layers_that_add_nothing_draw_nothing_else() -> None:
    model = idle_behind(model_of(deep()), 2)
    found = read_out(find_layers(model, "idle"), drawn_by(model, 1.0), 1.0)
    assert found.drawn[1:].all()
    assert not found.drawn[0].all()


def test_a_read_out_that_is_no_distribution_agrees_with_nothing() -> None:
    model = model_of(deep())
    exits = find_layers(model, "deep")
    responses = drawn_by(model, 1.0)
    whole = read_out(exits, responses, 1.0)

    class Broken(ExitLayers):
        calls = 0

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            Broken.calls += 1
            return super().logits(hidden) * (float("nan") if Broken.calls == 1 else 1.0)

    found = read_out(Broken(exits.model, exits.path, exits.norm), responses, 1.0)
    assert not found.drawn[0].any()
    assert not found.greedy[0].any()
    assert not found.probability[0].any()
    assert np.array_equal(found.drawn[1:], whole.drawn[1:])
