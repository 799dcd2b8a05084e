# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench serve`: load on a server, as its clients see it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.serve import check_libraries

if TYPE_CHECKING:
    from freewheel.cli import load_report
else:
    load_report = Later("freewheel.cli.load_report")

LIBRARIES = frozenset({"httpx", "prometheus_client"})

HELP = (
    "Send requests to a running server and time their streams.\n\n"
    "Any server with OpenAI's endpoints will do. --json prints the keys of vLLM's serving "
    "benchmark; drafts are the server's own counts, from its /metrics.\n\n"
    "TTFT: from sending a request to its first text. TPOT: time per output token after it. ITL: "
    "between two events of a stream; with drafts an event brings several tokens. Client and "
    "server on one machine share its processors."
)

Url = Annotated[str, typer.Option(help="Where the server is.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="File with the key on its first line; or FREEWHEEL_API_KEY.")
]
Rate = Annotated[float, typer.Option(help="Requests a second; inf sends all at once.")]
Goals = Annotated[
    list[str] | None,
    typer.Option(help="ttft:MS, tpot:MS, e2el:MS: what a request must keep to count as good."),
]


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Default: the first that the server has.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    num_prompts: Annotated[
        int | None, typer.Option(help="Default: the file's lines, or 100.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Random token ids of each prompt; default 64.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Prompts, one a line; .jsonl: objects with a prompt.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    request_rate: Rate = math.inf,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: in bursts.")] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at once, at most.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before those that count.")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers have all their tokens; not every server can.")
    ] = True,
    temperature: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Draws random prompts and times.")] = 0,
    goodput: Goals = None,
    api_key_file: KeyFile = None,
    save_detailed: Annotated[bool, typer.Option(help="With --json: each request too.")] = False,
    json: o.Json = False,
) -> None:
    """Send requests to a running server. `HELP` says what is measured."""
    check_libraries(LIBRARIES, "bench serve", "server")
    load = {"url": url.rstrip("/"), "rate": request_rate, "burstiness": burstiness}
    load |= {"concurrency": max_concurrency, "warm_ups": num_warmups, "seed": seed}
    fields = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    answered = load_report.send_load(
        load,
        {"model": model, "endpoint": endpoint, "fields": fields},
        {"file": prompt_file, "count": num_prompts, "tokens": prompt_tokens}
        | {"max_tokens": max_tokens, "seed": seed},
        goodput or [],
        api_key_file,
        json=json,
        detailed=save_detailed,
    )
    if not answered:
        raise typer.Exit(1)
