"""The output of `rlhfless probe`: tables for the terminal, and a page with plots."""

from collections.abc import Sequence
from html import escape

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfless_functions.api.probe import LayerReadout, ModelProbe, ProbeResult
from rlhfless_operator.formatting import format_number, format_percent
from rlhfless_operator.report.charts import Series, line_chart
from rlhfless_operator.report.page import page, tiles

_READOUTS = {
    "greedy": "likeliest token is the model's",
    "drawn": "draws the model's token",
    "settled": "draws it from here on",
    "probability": "probability of the model's token",
}


def view(result: ProbeResult) -> Group:
    """Return a table of the models, one of the layers if there is one model, and a sentence on drafting for each."""
    parts: list[Table | Text] = [_models(result.models)]
    if len(result.models) == 1:
        parts += [Text(), _layers(result.models[0])]
    parts += [Text(), *(Text(verdict(model)) for model in result.models)]
    return Group(*parts)


def verdict(model: ModelProbe) -> str:
    """Describe the expected and the measured gain of drafting by an early exit."""
    best, decoded = model.best, model.decoded
    if best is None:
        return f"{model.name}: a model of one layer has no early exit"
    way = f"up to {best.drafts} {'token' if best.drafts == 1 else 'tokens'} drafted after layer {best.layer}"
    expected = f"{format_number(best.speed)} times plain decoding's tokens a second expected"
    text = f"{model.name}: early-exit drafting {'pays' if model.pays else 'does not pay'}: {way}: {expected}"
    if decoded is not None:
        text += (
            f", {format_number(decoded.speed)} measured, {decoded.identical} of {decoded.responses} responses identical"
        )
    return text


def probe_page(result: ProbeResult) -> str:
    """Return the whole page as HTML: by step if several steps were probed, and by layer for the first and the last."""
    models = result.models
    title = models[0].name if len(models) == 1 else f"{models[0].name} to {models[-1].name}"
    body = f"<h1>Early exit: {escape(title)}</h1>"
    last = models[-1]
    entries = [
        ("Suitability", f"{last.suitability:.3f}", "mean share of layers behind the one where a draw is settled"),
        ("One exit for all", format_percent(last.skipped.one_layer), _agreeing(last, f"layer {last.skipped.layer}")),
        ("By confidence", format_percent(last.skipped.by_confidence), _agreeing(last, "of layers skipped")),
    ]
    if last.best is not None:
        entries.append(("Drafting", f"{last.best.speed:.2f} ×", "tokens a second, of one sequence, expected"))
    body += tiles(entries)
    if len(models) > 1:
        body += f"<section><h2>By model</h2>{_by_step(models)}</section>"
    for model in models if len(models) < 3 else (models[0], last):
        body += f"<section><h2>{escape(model.name)}</h2>{_by_layer(model)}<p>{escape(verdict(model))}</p></section>"
    return page(f"Early exit: {title} – rlhfless", body)


def _agreeing(model: ModelProbe, what: str) -> str:
    return f"{what}, at {format_percent(model.skipped.agreement)} of the draws the same"


def _models(models: Sequence[ModelProbe]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for title in (
        "layers",
        "tokens",
        "suitability",
        "skip at\none layer",
        "skip by\nconfidence",
        "tokens\na pass",
        "speed",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for model in models:
        best = model.best
        table.add_row(
            model.name, str(model.layers), str(model.tokens), f"{model.suitability:.3f}",
            format_percent(model.skipped.one_layer), format_percent(model.skipped.by_confidence),
            "" if best is None else f"{best.tokens_per_pass:.2f}", "" if best is None else f"{best.speed:.2f}",
        )  # fmt: skip
    return table


def _layers(model: ModelProbe) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "greedy", "drawn", "likeliest", "probability", "settled", "drafts", "speed"):
        table.add_column(title, justify="right", no_wrap=True)
    ways = {way.layer: way for way in model.exits}
    for each in model.by_layer:
        way = ways.get(each.layer)
        numbers = (each.greedy, each.drawn, each.likeliest, each.probability, each.settled)
        drafting = ("", "") if way is None else (f"{way.drafts} {way.choice}", f"{way.speed:.2f}")
        table.add_row(str(each.layer), *(f"{number:.3f}" for number in numbers), *drafting)
    return table


def _by_layer(model: ModelProbe) -> str:
    xs = [float(each.layer) for each in model.by_layer]
    series = [
        Series(title, [float(getattr(each, name)) for each in model.by_layer], f"c{number}")
        for number, (name, title) in enumerate(_READOUTS.items(), start=1)
    ]
    charts = line_chart(
        xs,
        series,
        title="Read-outs",
        note=f"Shares and means over {model.tokens} tokens.",
        x_name="layer",
        from_zero=True,
    )
    if model.exits:
        charts += line_chart(
            [float(way.layer) for way in model.exits],
            [
                Series("tokens a second, relative to plain", [way.speed for way in model.exits], "c1"),
                Series("cost of a draft, in passes", [way.draft_cost for way in model.exits], "c2"),
            ],
            title="Drafting",
            note="The best number of drafts at each exit. Above 1 it pays.",
            x_name="exit layer",
            from_zero=True,
        )
    return f'<div class="charts">{charts}</div>'


def _by_step(models: Sequence[ModelProbe]) -> str:
    steps = [model.step for model in models]
    known = [float(step) for step in steps if step is not None]
    ascending = len(known) == len(models) and known == sorted(set(known))
    xs = known if ascending else [float(number) for number in range(1, len(models) + 1)]
    exits = min(model.layers for model in models) - 1

    def at(layer: int) -> Series:
        values = [_layer(model, layer).drawn for model in models]
        return Series(f"layer {layer}", values, f"c{(layer - 1) % 6 + 1}")

    middle = sorted({1 + exits * part // 5 for part in range(6)} - {exits + 1}) if exits else []
    x_name = "step" if ascending else "model"
    charts = line_chart(
        xs,
        [
            Series("suitability", [model.suitability for model in models], "c1"),
            Series("skip at one layer", [model.skipped.one_layer for model in models], "c2"),
            Series("skip by confidence", [model.skipped.by_confidence for model in models], "c3"),
        ],
        title="Suitability",
        x_name=x_name,
        from_zero=True,
    )
    if middle:
        charts += line_chart(
            xs, [at(layer) for layer in middle], title="Draws the model's token", x_name=x_name, from_zero=True
        )
    if all(model.best is not None for model in models):
        speeds = [model.best.speed if model.best is not None else 0.0 for model in models]
        charts += line_chart(
            xs, [Series("speed", speeds, "c1")], title="Drafting, relative to plain", x_name=x_name, from_zero=True
        )
    return f'<div class="charts">{charts}</div>'


def _layer(model: ModelProbe, layer: int) -> LayerReadout:
    return model.by_layer[layer - 1]
