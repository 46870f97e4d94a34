"""`rlhfless probe`: measure how suited models are to early exit."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DType = Literal["float32", "bfloat16"]


def probe(
    models: Annotated[
        list[str],
        typer.Argument(help="Hugging Face folders or names, runs' folders, or checkpoints (RUN/checkpoints/*)."),
    ],
    data: Annotated[str | None, typer.Option(help="Prompts, as in a job's data.source; by default the run's.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of the first prompts to answer.")] = 32,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Temperature of the draws; 0 is greedy. By default the run's, or 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response; by default the run's, or 256 if the model allows it.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; longer ones are skipped. By default the run's, or 1024.")
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column of the prompt; found by its usual names.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Source of the tokenizer; by default the model.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Number format; by default the run's, or float32 on a CPU, bfloat16 on a GPU.")
    ] = None,
    agreement: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the draws that must stay the same when layers are skipped.")
    ] = 0.9,
    draft: Annotated[bool, typer.Option("--draft", help="Also decode some responses with such drafts.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure how suited models are to early exit, and what drafts from their first layers would save."""
    from rlhfless_operator.console import print_tables
    from rlhfless_operator.local.probe import ProbeError, make_probe, run_probe
    from rlhfless_operator.local.probe_view import probe_page, view

    if html is not None and not html.parent.is_dir():
        raise ProbeError(f"--html: the folder {html.parent} does not exist; create it, or name another file")
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
        print_tables(view(result))
