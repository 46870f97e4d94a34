"""The options of `rlhfless probe`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DType = Literal["float32", "bfloat16"]


def probe(
    models: Annotated[
        list[str],
        typer.Argument(help="Hugging Face folders or names, runs' folders, or checkpoints (RUN/checkpoints/*)."),
    ],
    data: Annotated[str | None, typer.Option(help="Prompts, as a job's data.source; a run's own if left out.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the first prompts are answered.")] = 32,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of the draws; 0 takes the likeliest token. A run's own, or 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response. A run's own, or 256 where the model has room.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer prompts are left out. A run's own, or 1024.")
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column of the prompt; told by its usual names.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer is, if not with the model.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Number format. A run's own, or float32 on a CPU and bfloat16 on a GPU.")
    ] = None,
    agreement: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the draws that skipped layers must leave as they are.")
    ] = 0.9,
    draft: Annotated[bool, typer.Option("--draft", help="Also decode some responses with such drafts.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's choice if left out.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure how suited models are to early exit, and what drafts by their first layers would bring."""
    from rich.console import Console

    from rlhfless_operator.local.probe import ProbeError, make_probe, run_probe
    from rlhfless_operator.local.probe_view import probe_page, view

    if html is not None and not html.parent.is_dir():
        raise ProbeError(f"--html: there is no folder {html.parent}; make it, or name another file")
    asked = make_probe(
        models,
        data=data,
        prompt_column=prompt_column,
        tokenizer=tokenizer,
        dtype=dtype,
        temperature=temperature,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        prompts=prompts,
        samples=samples,
        agreement=agreement,
        draft=draft,
        seed=seed,
        threads=threads,
    )
    result = run_probe(asked)
    if html is not None:
        html.write_text(probe_page(result), encoding="utf-8")
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        Console().print(view(result))
