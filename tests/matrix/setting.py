"""What jobs of the matrix are made from: a tiny model, a few prompts in every form, and rewards of every kind."""

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from rlhfless_operator.job.spec import RLHFJob
from tests.matrix.covering import Combination
from tests.matrix.options import LEFT_OUT, axes

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"

_DIGITS = """
def reward(completions, **columns):
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]
"""
_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))}
"""
_RAISES = """
def reward(completions, ground_truth, **columns):
    if int(ground_truth[0]) % 3 == 1:
        raise ValueError("an answer without a score")
    return [float("1" in str(completion)) for completion in completions]
"""


SILENT = [{"input": "", "output": ""}]
"""A test that a response passes if it is a program, such as `12 + 3`, and fails if it is none, such as `12 +`."""


def rows() -> list[dict[str, Any]]:
    """Six prompts under every name that a column may have."""
    made = []
    for number in range(6):
        text = f"{number}+2="
        truth = str(number + 2)
        row = {"prompt": text, "question": text, "messages": [{"role": "user", "content": text}]}
        made.append({**row, "ground_truth": truth, "truth": truth, "checks": SILENT, "data_source": "sums"})
    return made


@dataclass(frozen=True)
class Setting:
    """Where everything is that the documents name."""

    folder: Path
    model: Path
    server: str

    def document(self, combination: Combination, name: str = "matrix") -> dict[str, Any]:
        """The job of a combination."""
        spec: dict[str, Any] = {"artifacts": {"uri": str(self.folder / "runs")}}
        for path, values in axes().items():
            if (value := values[combination[path]]) is not LEFT_OUT:
                _put(spec, path.split("."), self._filled_in(value))
        spec.setdefault("model", {})["source"] = str(self.model)
        read = [spec["data"], spec.get("evaluation", {}).get("data", {})]
        if any(data.get("promptColumn") == "messages" for data in read):
            spec["model"]["chatTemplate"] = TEMPLATE
        return {"apiVersion": "rlhfless.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": spec}

    def write(self, combination: Combination, name: str) -> Path:
        """The same as a file beside what it names."""
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self.document(combination, name)))
        return file

    def spec_of(self, file: Path) -> dict[str, Any]:
        """What `write` has written."""
        spec: dict[str, Any] = yaml.safe_load(file.read_text())["spec"]
        return spec

    def _filled_in(self, value: Any) -> Any:
        places = {"$MODEL": str(self.model), "$REWARD_MODEL": str(self.folder / "judge"), "$SERVER": self.server}
        if isinstance(value, Mapping):
            return {name: self._filled_in(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._filled_in(inner) for inner in value]
        return places.get(value, value) if isinstance(value, str) else value


def can_be(combination: Combination) -> bool:
    """Whether a combination is a job that can run on this machine."""
    document = Setting(Path("folder"), Path("model"), "http://server").document(combination)
    try:
        RLHFJob.model_validate(document)
    except ValueError:
        return False
    return True


@contextmanager
def open_setting(folder: Path, tiny_model: Path) -> Iterator[Setting]:
    """Write down everything that the documents may name, and serve rewards."""
    import datasets

    for name, text in {"reward.py": _DIGITS, "score.py": _SCORE, "raises.py": _RAISES}.items():
        (folder / name).write_text(text)
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    pq.write_table(pa.Table.from_pylist(rows()), folder / "train.parquet")
    datasets.Dataset.from_list(rows()).save_to_disk(folder / "saved")
    judge = folder / "judge"
    shutil.copytree(tiny_model, judge, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(1)
    Qwen3ForSequenceClassification(Qwen3Config.from_pretrained(tiny_model, num_labels=1)).save_pretrained(judge)
    (judge / "chat_template.jinja").write_text(TEMPLATE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Rewards)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Setting(folder, tiny_model, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


class _Rewards(BaseHTTPRequestHandler):
    """A reward server in OpenRLHF's form."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"rewards": [float(text.count("2")) for text in asked["query"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing is said of requests."""


def _put(place: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
