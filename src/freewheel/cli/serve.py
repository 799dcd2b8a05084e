# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve`: answer over HTTP."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli import options as o
from freewheel.cli.driver import check_early
from freewheel.cli.later import Later
from freewheel.config import KV_PORT, EngineConfig, environment_api_key
from freewheel.errors import ConfigError, FreewheelError
from freewheel.spec.private import warn_of_readers

if TYPE_CHECKING:
    from freewheel.server import logs, settings, strays
    from freewheel.server import run as running
else:
    running, settings = Later("freewheel.server.run"), Later("freewheel.server.settings")
    logs, strays = Later("freewheel.server.logs"), Later("freewheel.server.strays")

LIBRARIES = frozenset(
    {"fastapi", "httptools", "msgspec", "prometheus_client", "pydantic", "starlette"}
    | {"uvicorn", "uvloop", "zmq"}
)
KEY_FILE_BYTES = 1 << 16


KeyFile = Annotated[Path | None, typer.Option(help="Keys, one a line; or set FREEWHEEL_API_KEY.")]
PrefillBatch = Annotated[
    int | None, typer.Option(help="Prompts that share a round; default: 2, or 1 of one request.")
]
PrefillShare = Annotated[
    float, typer.Option(help="Of contested rounds, the prompts' share: sooner or smoother.")
]
AdminSocket = Annotated[
    Path | None, typer.Option(help="Where an operator is listened to: a Unix socket's path.")
]
DumpDir = Annotated[
    Path | None, typer.Option(help="Keep requests of a failed engine there, for replay.")
]
OtlpEndpoint = Annotated[
    str | None, typer.Option(help="A collector's address for traces, OTLP over HTTP.")
]


def serve(
    model: Annotated[str, typer.Argument(help="A folder, or a shipped model.")] = "demo",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    api_key_file: KeyFile = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let others in, no key.")] = False,
    max_batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 16,
    prefill_batch: PrefillBatch = None,
    page_size: o.PageSize = None,
    load_format: o.LoadFormat = "safetensors",
    cache_bytes: Annotated[int, typer.Option(help="Budget of the paged cache.")] = 1 << 30,
    queue_tokens: Annotated[int, typer.Option(help="Prompt tokens that may wait.")] = 1 << 17,
    max_requests: Annotated[int, typer.Option(help="Answers under way or waiting.")] = 512,
    queue_seconds: Annotated[float, typer.Option(help="Wait for a first token.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(help="Time to finish after SIGTERM.")] = 30.0,
    stall_seconds: Annotated[float, typer.Option(help="Silence that means death.")] = 60.0,
    grammar_seconds: Annotated[float, typer.Option(help="Compiling of one form.")] = 10.0,
    prefix_cache: Annotated[bool, typer.Option(help="Keep pages of ended requests.")] = True,
    prefill_share: PrefillShare = 0.5,
    metrics_prefix: Annotated[str, typer.Option(help="vllm makes its boards work.")] = "freewheel",
    admin_socket: AdminSocket = None,
    dump_dir: DumpDir = None,
    otlp_endpoint: OtlpEndpoint = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="One object a line.")] = False,
    guard: Annotated[bool, typer.Option("--guard", help="Count host reads.")] = False,
    speculate: o.Speculate = "3",
    drafter: o.Drafter = "auto",
    device: o.Device = "auto",
    graph: o.Graph = "auto",
    run_ahead: o.RunAhead = 2,
    chunk: o.Chunk = 256,
    context_len: o.ContextLen = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    host_cache_gb: o.HostCacheGb = 0.0,
    disk_cache_gb: o.DiskCacheGb = 0.0,
    disk_cache_dir: o.DiskCacheDir = None,
    canary: o.Canary = "off",
    strict: o.Strict = False,
    perturb: o.Perturb = 0,
    perturb_seed: o.PerturbSeed = 0,
    threads: o.Threads = 1,
    tp: o.Tp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = False,
    check_ranks: o.CheckRanks = False,
    deterministic: o.Deterministic = False,
    role: o.Role = None,
    kv_host: o.KvHost = "127.0.0.1",
    kv_port: o.KvPort = KV_PORT,
    kv_wire: o.KvWire = "auto",
    kv_peers: o.KvPeers = None,
    kv_seconds: o.KvSeconds = 30.0,
    kv_key_file: o.KvKeyFile = None,
) -> None:
    """Answer over HTTP: OpenAI's and Anthropic's endpoints, metrics, and a page at /."""
    _serve(locals())


def _serve(given: dict[str, Any]) -> None:
    """With all that `serve` was given, by name. Raises what it raises."""
    if given["json_logs"]:
        logs.set_up_logs(as_json=True, stream=strays.gather_strays())
    prompts = given["prefill_batch"]
    given |= {
        "speculate": o.depth(given["speculate"]),
        "canary": o.canary(given["canary"]),
        "prefill_batch": min(2, given["max_batch"]) if prompts is None else prompts,
        "kv_peers": tuple(given["kv_peers"] or ()),
    }
    engine = {one.name: given[one.name] for one in fields(EngineConfig) if one.name in given}
    config = EngineConfig(**engine)
    check_early(config)
    check_libraries(LIBRARIES, "serve", "server")
    if given["otlp_endpoint"] is not None:
        check_libraries(frozenset({"opentelemetry.sdk"}), "--otlp-endpoint", "otel")
    kept = {one.name for one in fields(settings.ServerSettings)}
    server = {name: value for name, value in given.items() if name in kept}
    name = given["served_name"] or Path(config.model).name
    keys = read_keys(given["api_key_file"])
    running.serve(config, settings.ServerSettings(**server, model_name=name, api_keys=keys))


def check_libraries(names: frozenset[str], command: str, extra: str) -> None:
    """Raise FreewheelError, with what to do, if one of the libraries is not installed."""
    for name in sorted(names):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise FreewheelError(
                f"{command} needs the library {error.name!r}; install Freewheel with its {extra} "
                f"extra: pip install '.[{extra}]' in a clone"
            ) from error


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the environment and of a file. Raises ConfigError for a file without any."""
    own = environment_api_key()
    return (*(() if own is None else (own,)), *(() if path is None else keys_of(path)))


def keys_of(path: Path) -> list[str]:
    """The keys of a file, one a line. Raises ConfigError if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(KEY_FILE_BYTES).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path} cannot be read: {error}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"api_key_file: {path} holds no key")
    warn_of_readers("api_key_file", path)
    return found
