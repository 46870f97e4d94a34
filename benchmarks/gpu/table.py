"""The result of `measure.py` as text for a terminal."""

from collections.abc import Callable, Iterator
from typing import Any


def table(result: dict[str, Any]) -> str:
    """A block of lines for each shape, one or more for each of its parts."""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines = [f"{', '.join(result['gpus']) or result['machine']}; {versions}"]
    for name, shape in result["shapes"].items():
        lines += ["", name]
        for part, found in shape["parts"].items():
            lines += [f"  {part:8} {line}" for line in _shown(_LINES[part], found)]
        if "times_as_fast" in shape:
            lines.append(f"  a step is {shape['times_as_fast']:.2f} times as fast as TRL's")
    return "\n".join(lines)


def _shown(show: Callable[[dict[str, Any]], Iterator[str]], found: dict[str, Any]) -> list[str]:
    """Lines of what was found, or why there is nothing."""
    for reason in ("failed", "not_measured"):
        if reason in found:
            return [f"{reason.replace('_', ' ')}: {found[reason]}"]
    return list(show(found))


def _model(found: dict[str, Any]) -> Iterator[str]:
    yield f"{_size(found['bytes'])} in {found['dtype']} on {found['device']}, random"


def _step(found: dict[str, Any]) -> Iterator[str]:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found["stage_seconds"].items())
    peak = _size(found["peak_gpu_bytes"] or found["peak_host_bytes"])
    yield (
        f"{found['median_step_seconds']:.2f} s ({stages}), peak {peak}; {found['trained']},"
        f" {found['samples']} responses of {found['response_tokens']:.0f} tokens by {found['engine']}"
    )


def _learner(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['trained']}: {found['tokens_per_second']:,.0f} tokens/s,"
        f" {found['flops_per_second'] / 1e12:.3g} TFLOP/s in {found['arithmetic']},"
        f" MFU {found['mfu']:.1%} of {found['mfu_of']}"
    )


def _decode(found: dict[str, Any]) -> Iterator[str]:
    for engine, decoded in found["engines"].items():
        yield from (f"{engine}: {line}" for line in _shown(_decoded, decoded))


def _decoded(found: dict[str, Any]) -> Iterator[str]:
    speeds = ", ".join(f"{batch}: {speed:,.0f}" for batch, speed in found["tokens_per_second"].items())
    room = found["room"]["sequences"]
    yield f"tokens/s by sequences {speeds}; room for {room}, started in {found['start_seconds']:.1f} s"


def _conformance(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['passed']} passed, {found['skipped']} skipped"


def _weights(found: dict[str, Any]) -> Iterator[str]:
    publish = found["publish"]
    yield (
        f"{_size(found['bytes'])} published in {publish['seconds']:.3f} s ({publish['gigabytes_per_second']:.2f} GB/s),"
        f" of which written in {publish['write_seconds']:.3f} s; checksums alone {found['checksum_seconds']:.3f} s"
    )
    for engine, taken in found["engines"].items():
        yield from (f"taken over by {engine}: {line}" for line in _shown(_taken, taken))


def _taken(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['seconds']:.3f} s ({found['gigabytes_per_second']:.2f} GB/s)"


def _sleep(found: dict[str, Any]) -> Iterator[str]:
    for function, slept in found.items():
        if isinstance(slept, dict):
            yield from (f"{function}: {line}" for line in _shown(_slept, slept))


def _slept(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{_size(found['freed_bytes'])} of {_size(found['held_bytes'])} given back in {found['sleep_seconds']:.3f} s,"
        f" there again in {found['wake_seconds']:.3f} s"
    )


_LINES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "model": _model,
    "step": _step,
    "trl": _step,
    "learner": _learner,
    "decode": _decode,
    "conformance": _conformance,
    "weights": _weights,
    "sleep": _sleep,
}


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.2f} MB"
