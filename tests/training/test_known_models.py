"""The table of well-known models, and where a shape comes from."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.planner.latency.devices import model_shape
from rlhfless_operator.planner.latency.roofline import LLAMA_70B, QWEN_7B
from rlhfless_operator.training.costs.hub import HubUnavailableError, cached_config, fetched_config
from rlhfless_operator.training.costs.model_shape import find_shape, known_models

PUBLISHED = {
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2,
    "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "llama-2-70b": 69.0,
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6, "llama-3.1-405b": 406, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.6,
    "gemma-2b": 2.51, "gemma-7b": 8.54, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "mistral-7b": 7.25, "mathstral-7b": 7.25,
    "mistral-large-instruct": 123,
}  # fmt: skip
"""Billions of parameters of the language model, as the cards of the models say."""
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with nothing in it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def keep(cache: Path, name: str, config: dict[str, Any], commit: str = "c0ffee", branch: str = "main") -> None:
    """Leave what a download leaves."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", sorted(known_models()))
def test_the_fields_make_the_number_of_parameters_that_the_authors_publish(name: str) -> None:
    plain = name.replace("-coder", "").replace("-math", "")
    billions = model_shape(name, known_models()[name]).parameters / 1e9
    assert billions == pytest.approx(PUBLISHED[plain], rel=0.015)


@pytest.mark.parametrize(
    ("name", "layers", "kv_bytes"),
    [
        ("Qwen/Qwen3-8B", 36, 2 * 2 * 36 * 8 * 128),
        ("Qwen/Qwen3-4B-Instruct-2507", 36, 2 * 2 * 36 * 8 * 128),
        ("meta-llama/Llama-3.1-8B-Instruct", 32, 2 * 2 * 32 * 8 * 128),
        ("meta-llama/Meta-Llama-3.1-8B", 32, 2 * 2 * 32 * 8 * 128),
        ("google/gemma-3-4b-it", 34, 2 * 2 * 34 * 4 * 256),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32, 2 * 2 * 32 * 8 * 128),
        ("Qwen2.5-Math-1.5B", 28, 2 * 2 * 28 * 2 * 128),
    ],
)
def test_a_well_known_model_needs_neither_folder_nor_network(name: str, layers: int, kv_bytes: int) -> None:
    shape = find_shape(name)
    assert (shape.name, shape.layers, shape.kv_bytes) == (name.rsplit("/", 1)[-1], layers, kv_bytes)


def test_the_latency_of_a_measured_model_is_that_of_all_of_its_shape(hub_cache: Path) -> None:
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == QWEN_7B
    assert find_shape("Qwen/Qwen2.5-Math-7B") == QWEN_7B
    assert find_shape("meta-llama/Llama-2-70b-hf") == LLAMA_70B
    keep(hub_cache, "somebody/finetune", known_models()["qwen2.5-7b"])
    assert find_shape("somebody/finetune") == QWEN_7B


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8Bx", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-VL-8B", "somebody/new"])
def test_other_models_are_not_taken_for_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"no folder here, nothing in the hub's cache and no name that is known: give"):
        find_shape(name)


def test_what_was_downloaded_counts_before_the_table(hub_cache: Path) -> None:
    keep(hub_cache, "somebody/Qwen3-8B-pruned", {**QWEN3_8B, "num_hidden_layers": 30})
    assert find_shape("somebody/Qwen3-8B-pruned").layers == 30
    keep(hub_cache, "somebody/new", QWEN3_8B)
    keep(hub_cache, "somebody/new", {**QWEN3_8B, "num_hidden_layers": 12}, commit="beef", branch="small")
    assert (find_shape("somebody/new").layers, find_shape("somebody/new", revision="small").layers) == (36, 12)
    assert find_shape("somebody/new", revision="beef").layers == 12
    assert cached_config("somebody/new", "elsewhere") is None


def test_the_table_fills_in_what_a_configuration_leaves_to_its_class(hub_cache: Path) -> None:
    keep(hub_cache, "google/gemma-3-4b-it", {"text_config": {"hidden_size": 2560, "num_hidden_layers": 34}})
    assert find_shape("google/gemma-3-4b-it").parameters == pytest.approx(3.88e9, rel=0.01)


def test_experts_count_whole_in_memory_and_as_a_token_passes_them_in_time() -> None:
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(3.3e9, rel=0.03)
    one, many = (shape.touched_parameters(tokens) for tokens in (1, 256))
    assert one < many <= shape.parameters
    dense = find_shape("Qwen/Qwen3-8B")
    assert dense.active_parameters == dense.touched_parameters(64) == dense.parameters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 8}, "num_experts_per_tok is not in the configuration"),
        ({"n_routed_experts": 8, "kv_lora_rank": 512}, "compresses keys and values"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "has layers without experts"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1}, r"without experts \(first_k_dense_replace\)"),
    ],
)
def test_other_mixtures_are_not_forecast_as_these(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_shape("m", {**QWEN3_8B, **fields})


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """A hub with one model, for who has a token; yields what it is asked."""
    asked: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("Authorization")
            asked.append((self.path, token))
            there = self.path == "/somebody/new/resolve/main/config.json"
            self.send_response(404 if not there else 200 if token == "Bearer secret" else 401)
            self.end_headers()
            self.wfile.write(json.dumps(QWEN3_8B).encode() if there else b"")

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def test_the_hub_is_asked_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch) as asked:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with pytest.raises(ValueError, match=r"the hub could not be asked \(.* answers 401; set HF_TOKEN"):
            find_shape("somebody/new", ask_hub=fetched_config)
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert find_shape("somebody/new", ask_hub=fetched_config).layers == 36
        assert asked[-1] == ("/somebody/new/resolve/main/config.json", "Bearer secret")
        with pytest.raises(HubUnavailableError, match="answers 404"):
            fetched_config("somebody/else")
        before = len(asked)
        find_shape("Qwen/Qwen3-8B", ask_hub=fetched_config)
        assert len(asked) == before, "a known model is not asked for"


def test_without_a_network_the_remedy_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ValueError, match=r"model.source is 'somebody/new', .*Connection refused.*give the folder of"):
        find_shape("somebody/new", ask_hub=fetched_config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubUnavailableError, match="HF_HUB_OFFLINE is set"):
        fetched_config("somebody/new")
