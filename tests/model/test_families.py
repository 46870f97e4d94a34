"""What users bring: the families of models that are trained today go through every stage; others are refused.

Each family is a random model of two layers, whose distributions really depend on the context, saved by transformers
with a tokenizer and a chat template.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    Gemma3Config,
    PreTrainedConfig,
    T5Config,
)

from rlhfless_functions.api import (
    BatchReference,
    ExportRequest,
    GenerationRequest,
    LearnRequest,
    LearnResult,
    MaterializeRequest,
    PrepareRequest,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.rollouts import PreparedSample, read_prepared, read_rollouts
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.preparation.stage import Preparer
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    KlSettings,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    PythonReward,
    RewardSettings,
    SamplingSettings,
)
from rlhfless_functions.weights import load_critic, load_policy, load_tokenizer, longest_sequence
from tests.model.families import CAPPED, EVERY, FAMILIES, TOKENS, WINDOW, save

torch.set_num_threads(1)

TEMPERATURE = 0.8
SAMPLING = SamplingSettings(temperature=TEMPERATURE, max_prompt_tokens=32, max_response_tokens=12)
ALGORITHM = AlgorithmSettings(kl=KlSettings(coefficient=0.1)).resolved()
REWARD = "def reward(completion_ids): return [float(sum(ids) % 7) for ids in completion_ids]\n"


def context() -> TaskContext:
    return TaskContext(emit=lambda event: None)


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    preparer = Preparer()
    yield preparer
    preparer._scorer.close()


@dataclass
class Job:
    """A job's folder, and its stages one by one."""

    folder: Path
    model: ModelSettings
    preparer: Preparer

    def __post_init__(self) -> None:
        self.initial = WeightsReference(version=0, uri=self.model.source)
        self.prompts = str(self.folder / "prompts")
        self.tasks = [SampleTask(prompt=prompt, index=index) for prompt in range(2) for index in range(3)]
        self.generator = Generator()
        (self.folder / "reward.py").write_text(REWARD)
        self.reward = RewardSettings(name="sum", python=PythonReward(file=str(self.folder / "reward.py")))

    def key(self, stage: Any) -> TaskKey:
        return TaskKey(job_uid="job", step=1, stage=stage, part="0", attempt=0)

    def materialize(self, sampling: SamplingSettings = SAMPLING) -> None:
        rows = [{"messages": [{"role": "user", "content": text}]} for text in ("12+3", "the sum of 4 and 5")]
        (self.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        request = MaterializeRequest(
            key=self.key("preparation"), result="", model=self.model, sampling=sampling, sink=self.prompts,
            data=DataSettings(source=str(self.folder / "data.jsonl")),
        )  # fmt: skip
        self.preparer.run(request, context())

    def generate(self, weights: WeightsReference) -> list[str]:
        request = GenerationRequest(
            key=self.key("generation"), result="", model=self.model, weights=weights, prompts=self.prompts,
            samples=self.tasks, sampling=SAMPLING, seed=3, sink=str(self.folder / f"rollouts-{weights.version}"),
        )  # fmt: skip
        return self.generator.run(request, context()).parts

    def prepare(self, parts: list[str]) -> list[PreparedSample]:
        request = PrepareRequest(
            key=self.key("preparation"), result="", model=self.model, prompts=self.prompts, rollouts=parts,
            samples=self.tasks, rewards=[self.reward], algorithm=ALGORITHM,
            sampling=SAMPLING, policy=self.initial, old_log_probs=True, reference=self.initial, microbatch_tokens=4096,
            sink=str(self.folder / "prepared.parquet"),
        )  # fmt: skip
        self.preparer.run(request, context())
        found = read_prepared([request.sink])
        return [found[task.prompt, task.index] for task in self.tasks]

    def learn(self) -> LearnResult:
        request = LearnRequest(
            key=self.key("learning"), result="", model=self.model, initial=self.initial, base=self.initial,
            batch=BatchReference(step=1, parts=[str(self.folder / "prepared.parquet")], samples=self.tasks),
            algorithm=ALGORITHM,
            optimizer=OptimizerSettings(learning_rate=0.1), sampling=SAMPLING, learning=LearningSettings(),
            batch_settings=BatchSettings(prompts_per_step=2, samples_per_prompt=3), total_steps=1, seed=0,
            publish=str(self.folder / "weights-1"),
        )  # fmt: skip
        result = Learner().run(request, context())
        assert isinstance(result, LearnResult)
        return result

    def export(self, weights: WeightsReference) -> Path:
        request = ExportRequest(
            key=self.key("learning"), result="", model=self.model, weights=weights, model_card="# A model\n",
            destination=str(self.folder / "export"),
        )  # fmt: skip
        return Path(Learner().run(request, context()).uri)


def log_probs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """By the model's own forward pass, one sequence at a time."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    scores = (logits.double() / TEMPERATURE).log_softmax(-1)
    return scores.gather(1, torch.tensor(response)[:, None]).squeeze(1)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("name", EVERY)
def test_a_family_goes_through_every_stage(
    name: str, lora: LoraSettings | None, tmp_path: Path, tiny_model: Path, preparer: Preparer
) -> None:
    folder = save(EVERY[name], tmp_path / "model", tiny_model)
    assert (folder / "model.safetensors.index.json").exists()
    job = Job(tmp_path, ModelSettings(source=str(folder), dtype="float32", lora=lora), preparer)
    given = AutoModelForCausalLM.from_pretrained(folder)

    job.materialize()
    parts = job.generate(job.initial)
    assert any(len(one.prompt_tokens + one.response_tokens) > WINDOW + 4 for one in read_rollouts(parts).values())
    for sample in job.prepare(parts):
        expected = log_probs(given, sample.prompt_tokens, sample.response_tokens)
        for ours in (sample.log_probs, sample.old_log_probs, sample.reference_log_probs):
            torch.testing.assert_close(torch.tensor(ours).double(), expected, rtol=0, atol=1e-4)

    result = job.learn()
    assert result.metrics["mismatch/mean_exp_abs"] < 1.001
    assert result.metrics["policy/gradient_norm"] > 0

    exported = job.export(result.weights)
    trained = AutoModelForCausalLM.from_pretrained(exported)
    assert type(trained) is type(given)
    assert trained.config.tie_word_embeddings == given.config.tie_word_embeddings
    chat = [{"role": "user", "content": "1"}]
    assert AutoTokenizer.from_pretrained(exported).apply_chat_template(chat, tokenize=False) == "#1;"

    changed = 0.0
    for sample in read_rollouts(job.generate(result.weights)).values():
        expected = log_probs(trained, sample.prompt_tokens, sample.response_tokens)
        torch.testing.assert_close(torch.tensor(sample.log_probs).double(), expected, rtol=0, atol=1e-4)
        before = log_probs(given, sample.prompt_tokens, sample.response_tokens)
        changed = max(changed, float((expected - before).abs().max()))
    assert changed > 1e-3, "the weights that generate are the trained ones"


# --- what computes otherwise than its definition says ------------------------------------------------------------


def test_soft_capped_attention_is_computed_as_the_model_defines_it(tmp_path: Path, tiny_model: Path) -> None:
    folder = save(CAPPED, tmp_path / "model", tiny_model)
    model, weights = ModelSettings(source=str(folder), dtype="float32"), WeightsReference(version=0, uri=str(folder))
    defined = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    without = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    ids = torch.randint(2, TOKENS, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = defined(input_ids=ids).logits
        assert torch.equal(load_policy(model, weights)(input_ids=ids).logits, expected)
        assert (without(input_ids=ids).logits - expected).abs().max() > 0.1
        body = load_critic(model, weights).body
        assert torch.equal(body(input_ids=ids).last_hidden_state, defined.model(input_ids=ids).last_hidden_state)
    with pytest.raises(TaskError, match="needs a model with scaled dot-product attention; gemma2 has"):
        Generator().preload(model, weights)


def test_sequences_end_before_longrope_changes_its_frequencies(
    tmp_path: Path, tiny_model: Path, preparer: Preparer
) -> None:
    folder = save(FAMILIES["phi 4, longrope"], tmp_path / "model", tiny_model)
    job = Job(tmp_path, ModelSettings(source=str(folder), dtype="float32"), preparer)
    with pytest.raises(TaskError, match="more than the model's 64 positions"):
        job.materialize(SamplingSettings(max_prompt_tokens=32, max_response_tokens=60))


def test_the_longest_sequence_is_what_the_positions_allow() -> None:
    assert longest_sequence(FAMILIES["qwen3"]) == 128
    assert longest_sequence(FAMILIES["llama 3"]) == 128
    assert longest_sequence(FAMILIES["phi 4, longrope"]) == 64
    assert longest_sequence(FAMILIES["gemma 3"]) == 128
    assert longest_sequence(PreTrainedConfig()) is None


# --- what is refused ---------------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[PreTrainedConfig, str]] = {
    "t5": (T5Config(), r"holds an encoder-decoder model \(t5\): give a decoder-only model"),
    "bart": (BartConfig(), r"holds an encoder-decoder model \(bart\): give a decoder-only model"),
    "bert": (BertConfig(), r"holds no causal language model \(bert\): give a decoder-only model"),
    "images": (Gemma3Config(), r"reads more than text \(vision_config\): give its language model alone"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_no_decoder_of_text_is_refused_before_anything_is_read(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    config, message = UNSUPPORTED[name]
    config.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path)
    model, weights = ModelSettings(source=str(tmp_path)), WeightsReference(version=0, uri=str(tmp_path))
    for load in (load_policy, load_critic, load_tokenizer):
        with pytest.raises(TaskError, match=message) as caught:
            load(model, weights)
        assert caught.value.reason == "model_unloadable"


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, tiny_model: Path) -> None:
    AutoConfig.from_pretrained(tiny_model).save_pretrained(tmp_path)
    torch.save(AutoModelForCausalLM.from_pretrained(tiny_model).state_dict(), tmp_path / "pytorch_model.bin")
    model, weights = ModelSettings(source=str(tmp_path)), WeightsReference(version=0, uri=str(tmp_path))
    for load in (load_policy, load_critic):
        with pytest.raises(TaskError, match=r"weights in pytorch_model\.bin and none as safetensors: convert it") as it:
            load(model, weights)
        assert it.value.reason == "model_unloadable"


def test_a_folder_with_code_of_its_own_is_refused_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    model, weights = ModelSettings(source=str(tmp_path)), WeightsReference(version=0, uri=str(tmp_path))
    with pytest.raises(TaskError, match=r"custom code.* an architecture that transformers knows"):
        load_policy(model, weights)
