# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from freewheel.config import LOAD_FORMATS, MAX_RUN_AHEAD
from freewheel.errors import ConfigError
from freewheel.spec import MAX_DEPTH, MAX_VERIFY_WIDTH

Model = Annotated[str, typer.Argument(help="A folder in Hugging Face layout, or a shipped model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

Speculate = Annotated[
    str,
    typer.Option(help=f"Drafts a round, 0 to {MAX_DEPTH}; auto chooses for every round."),
]
Drafts = Annotated[int, typer.Option("--speculate", help=f"Drafts a round, 0 to {MAX_DEPTH}.")]
Drafter = Annotated[str, typer.Option(help="auto, mtp or lookup.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Graph = Annotated[str, typer.Option(help="auto, eager, tape or cuda.")]
RunAhead = Annotated[
    int,
    typer.Option(help=f"Rounds launched before the oldest letter is read, 0 to {MAX_RUN_AHEAD}."),
]
Chunk = Annotated[
    int, typer.Option(help=f"Prompt tokens computed in a round; {MAX_VERIFY_WIDTH + 1} or more.")
]
ContextLen = Annotated[
    int | None, typer.Option(help="Prompt and answer together; default: model's.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="auto, bf16, fp8: nearly twice the tokens, some of them others; or fp8-index: "
        "the indexer's keys alone, for long contexts."
    ),
]
HostCacheGb = Annotated[
    float,
    typer.Option(
        help="Host memory of each rank for cached prefixes, in GB of 10^9 bytes; 0: none."
    ),
]
DiskCacheGb = Annotated[
    float, typer.Option(help="The same in files, below host memory; 0 is none.")
]
DiskCacheDir = Annotated[
    str | None, typer.Option(help="Their folder; a restart finds them there again.")
]
Canary = Annotated[
    str,
    typer.Option(
        help="Check before every round that nothing changed by itself: off, all, or how many "
        "pages of a row in each round."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="What the canary finds ends its request with an error.")
]
Perturb = Annotated[
    int, typer.Option(help="Damage something on purpose in one of so many rounds; 0: never.")
]
PerturbSeed = Annotated[int, typer.Option(help="Of the schedule of such damage.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens of a cache page; default: model's.")]
LoadFormat = Annotated[
    str,
    typer.Option(
        help=f"{' or '.join(LOAD_FORMATS)}: read weights, or draw random ones on the device."
    ),
]
Tp = Annotated[
    int, typer.Option(help="Processes that share every layer, each on a device of its own.")
]
Dp = Annotated[
    int, typer.Option(help="Copies of all but the experts, of --tp processes each, with own rows.")
]
Ep = Annotated[
    bool, typer.Option("--ep", help="Deal out the experts whole to processes, not parts of each.")
]
CheckRanks = Annotated[
    bool,
    typer.Option("--check-ranks", help="Compare what processes decided, every round."),
]
Role = Annotated[
    str | None, typer.Option(help="prefill or decode: compute prompts for others, or fetch them.")
]
KvHost = Annotated[str, typer.Option(help="Where a prefill engine is asked for prompts.")]
KvPort = Annotated[int, typer.Option(help="Its port there, and one more a rank; 0: free ones.")]
KvWire = Annotated[str, typer.Option(help="auto, nixl or tcp: by what prompts' pages travel.")]
KvPeers = Annotated[
    list[str] | None,
    typer.Option("--kv-peer", help="Fetch from this host:port too; may be given repeatedly."),
]
KvKeyFile = Annotated[str | None, typer.Option(help="Holds the key that engines show one another.")]
KvSeconds = Annotated[
    float, typer.Option(help="How long a prompt is waited for, or kept for whoever asks.")
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="On CUDA: the same bits in any company; slower."),
]
Threads = Annotated[int, typer.Option(help="CPU threads; small models are fastest with 1.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer, at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this share; 1 is off.")]
MinP = Annotated[
    float, typer.Option(help="Keep tokens this likely against the likeliest; 0 is off.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="End at this text; may be given repeatedly.")]


def depth(text: str) -> int | str:
    """What `--speculate` says: a number, or auto. Raises ConfigError for anything else."""
    if text == "auto" or not (text.isascii() and text.removeprefix("-").isdigit()):
        return text  # the configuration says what may be
    return int(text)


def canary(text: str) -> int | str:
    """What `--canary` says: off, all, or a number. Raises ConfigError for anything else."""
    if text == "off":
        return 0
    return int(text) if text.isascii() and text.isdigit() else text


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers between commas. Raises ConfigError, naming the option, for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"{option}: must be whole numbers with commas between, got {text!r}")
    return [int(part) for part in parts]
