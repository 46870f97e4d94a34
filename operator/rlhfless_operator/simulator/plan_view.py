"""The output of `rlhfless plan`: the tables and sentences of a forecast."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rich.console import Group
from rich.table import Table

from rlhfless_operator.formatting import format_money


def _drafting(found: dict[str, Any]) -> str:
    if found["drafting"] == "never":
        return ""
    seen, drafts = found["tokens_per_pass"], found["drafts"]
    told = "" if seen is None else f"the run that the lengths are from got {seen:.2f} tokens a pass; "
    if drafts is None:
        return (
            f"\ndrafting: {told}the forecast counts one token a pass, as no run of this job with drafts is known"
            " (--trace), or vLLM has a model on several GPUs and drafts nothing; --acceptance says what would be"
        )
    return (
        f"\ndrafting: {told}the forecast has drafts in {drafts['coverage']:.0%} of a sequence's passes, and a drafted"
        f" token is right with a chance of {drafts['acceptance']:.0%}"
    )


def _engine(found: dict[str, Any]) -> str:
    if (factor := found["engine_factor"]) is not None:
        return f"generation: {factor:.2f} times as long as by the GPU's table, as in the run that the lengths are from"
    return (
        "generation: the GPU's kernels alone; vLLM's published times are 1.1 to 1.3 times as long for one sequence, and"
        " 1.5 to 2.5 times for large batches; --trace counts what a run measured"
    )


def _acting(found: dict[str, Any]) -> str:
    if not found["acts"]:
        return ""
    ahead = "; rollouts that go ahead of the learner are not forecast"
    if (acting := found["acting"]) is None:
        told = "neither their time nor what they give is counted; --trace counts what a run measured"
        return f"\nenvironments: {told}{ahead}"
    return (
        f"\nenvironments: a sample is away for {acting['away']:.3g} s, and is given {acting['given']:.2g} tokens, for"
        f" each token that it samples, as in the run that the lengths are from; its instance is kept{ahead}"
    )


def _memory(found: dict[str, Any]) -> str:
    return ", ".join(f"{stage} {size / 1e9:.0f} GB" for stage, size in found["memory"].items() if size)


def _chosen(found: dict[str, Any]) -> str:
    return f"; chosen: {', '.join(found['chosen'])}" if found["chosen"] else ""


def view(found: dict[str, Any]) -> Group:
    """Return a forecast for the terminal."""
    source = "measured" if found["measured"] else "computed from the data sheet"
    currency = found["currency"]
    head = (
        f"{found['job']}: {found['model']} on {found['gpus']} × {found['gpu']} an instance ({source}),"
        f" {format_money(Decimal(found['instance_hour']), currency)} an hour ({found['priced_by']})\n"
        f"memory of a GPU: {_memory(found)}{_chosen(found)}\n"
        f"actors: at most {found['actors_at_most']} ({found['actors_by']})\n"
        f"{_engine(found)}\n"
        f"lengths {found['lengths']}\n"
        f"start-up {found['startup_seconds']:g} s; preparation {found['preparation_seconds']:.1f} s, learning"
        f" {found['learning_seconds']:.1f} s and publishing {found['publishing_seconds']:.1f} s a step are the same for"
        " every number of actors"
        f"{'; the learner begins while others are generated' if found['learns_beside'] else ''}"
        f"{_acting(found)}{_drafting(found)}"
    )
    plans = [(f"λ = {row['cost_weight']:g}", row) for row in found["plans"]]
    plans += [("within the deadline", found["within_deadline"]), ("within the budget", found["within_budget"])]
    parts: list[Any] = [head, _table("A step", [(name, row) for name, row in plans if row], found)]
    parts.append(_table("From the fastest to the cheapest", [("", row) for row in found["front"]], found))
    if found["ahead"]:
        parts += [_ahead_table(found), _beside_table(found), _matching(found)]
        if found["preparation_seconds"]:
            parts.append(_preparing(found))
    return Group(*parts)


def _ahead_table(found: dict[str, Any]) -> Table:
    told = [f"maxStaleness: {row['max_staleness']}" if row["max_staleness"] else "without" for row in found["ahead"]]
    this = [", this job" if row["max_staleness"] == found["max_staleness"] else "" for row in found["ahead"]]
    names = [name + job for name, job in zip(told, this, strict=True)]
    title = "Rollouts that go ahead of the learner, in the long run"
    return _long_run_table(title, "async", list(zip(names, found["ahead"], strict=True)), found)


def _beside_table(found: dict[str, Any]) -> Table:
    title = f"Actors beside the learner, with maxStaleness: {found['max_staleness'] or 1}"
    return _long_run_table(title, "", [("", row) for row in found["beside"]], found)


def _long_run_table(title: str, first: str, rows: Sequence[tuple[str, dict[str, Any]]], found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    headings = (
        "actors",
        "seconds",
        "steps an hour",
        "generation busy",
        "learner busy",
        "staleness",
        "GPU-seconds",
    )
    for heading in (*headings, "a step"):
        table.add_column(heading, justify="right", overflow="fold")
    for name, row in rows:
        table.add_row(
            name,
            str(row["actors"]),
            f"{row['seconds']:.1f}",
            f"{3600 / row['seconds']:.0f}",
            f"{row['generation_busy']:.0%}",
            f"{row['learning_busy']:.0%}",
            f"{row['staleness']:.1f}",
            f"{row['gpu_seconds']:.0f}",
            format_money(Decimal(row["cost"]), found["currency"]),
        )
    return table


def _matching(found: dict[str, Any]) -> str:
    most, actors = found["max_staleness"] or 1, found["matching_actors"]
    if actors is None:
        return f"With maxStaleness: {most} the learner waits at times, with {found['actors_at_most']} actors, too."
    learner = f"the learner's {found['learner_gpus']} {'GPU' if found['learner_gpus'] == 1 else 'GPUs'}"
    return f"From {actors} {'actor' if actors == 1 else 'actors'} on, generation keeps up with {learner}."


def _preparing(found: dict[str, Any]) -> str:
    row = next(row for row in found["ahead"] if row["max_staleness"] == (found["max_staleness"] or 1))
    count = row["preparers"]
    return f"{'1 instance prepares' if count == 1 else f'{count} instances prepare'} then: {row['preparers_reason']}."


def _table(title: str, rows: Sequence[tuple[str, dict[str, Any]]], found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("plan", overflow="fold")
    for heading in (
        "actors",
        "learner GPUs",
        "seconds",
        "generation",
        "GPU-seconds",
        "of the bound",
        "a step",
        "the job",
    ):
        table.add_column(heading, justify="right", overflow="fold")
    for name, row in rows:
        cost = Decimal(row["cost"])
        table.add_row(
            name,
            str(row["actors"]),
            str(row["learner_gpus"]),
            f"{row['seconds']:.1f}",
            f"{row['generation_seconds']:.1f}",
            f"{row['gpu_seconds']:.0f}",
            f"{row['lower_bound_gpu_seconds'] / row['gpu_seconds']:.0%}",
            format_money(cost, found["currency"]),
            format_money(cost * found["steps"], found["currency"]) if found["steps"] else "",
        )
    return table
