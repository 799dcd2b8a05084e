# SPDX-License-Identifier: Apache-2.0
"""Every option of an engine, validated and resolved once; each resolved default says why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from freewheel.errors import CheckpointError, ConfigError
from freewheel.spec.handoff import KV_PORT, WireSettings, check_role
from freewheel.spec.mesh import Mesh
from freewheel.spec.options import Decisions, check_choice, check_deterministic, check_range
from freewheel.spec.shape import MAX_DEPTH, MAX_VERIFY_WIDTH, ShapeLadder
from freewheel.spec.violation import Watch

SHIPPED_MODELS = ("demo", "demo-v4")
"""Checkpoints that come with the package, by name."""

API_KEY_VARIABLE = "FREEWHEEL_API_KEY"
"""The environment variable that holds a server's key."""

DRAFTERS = ("auto", "mtp", "lookup")
DEVICES = ("auto", "cpu", "cuda")
GRAPHS = ("auto", "eager", "tape", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float64")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8", "fp8-index")
LOAD_FORMATS = ("safetensors", "dummy")
PRECISIONS = ("fp8", "mxfp4", "bf16")
"""What weights can be converted to."""

CANARY_ALL = "all"
"""Every page of every row of a round is looked at, before it computes."""

MAX_RUN_AHEAD = 3
AUTO_DEPTHS = (0, 1, 2, 3, 5)
"""What `speculate="auto"` chooses among. Each costs a graph for each batch."""
AUTO_START = 3
MAX_RANKS = 1024
ROLE_CACHE_GB = 1.0
"""Host memory of an engine with a role, unless it was told how much."""

_WIDTHS = (16, 64, 256, 1024, 4096)


def room_for(rounds: int, depth: int) -> int:
    """Tokens behind the context that a run of `rounds` rounds may need, rounds in flight included.

    A round decides at most `depth` + 1 tokens of a row, and writes as many drafts behind them.
    """
    return (rounds + MAX_RUN_AHEAD + 1) * (1 + depth) + depth


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is asked for.

    `speculate`: drafts a round (0 to 7), or "auto": chosen for each round among AUTO_DEPTHS. They
    come by `drafter`: the model's own multi-token-prediction layer (mtp), prompt look-up (lookup),
    or the first of these that the model has (auto). `run_ahead`: rounds launched before the oldest
    letter is read (0 to 3). `chunk`: prompt tokens a round computes of one request, at most.
    `max_batch`: requests decoded together. `context_len`: tokens of prompt and answer together;
    None takes the model's own limit. `page_size`: tokens of a cache page; None takes what suits the
    model. `cache_bytes`: budget of the paged cache. `kv_cache_dtype`: how its rows are stored; auto
    is in what is computed in, fp8 holds nearly twice the tokens and changes some, fp8-index has the
    index keys alone in FP8. `threads`:
    intra-op CPU threads. `prefix_cache`: keep pages of ended requests, for those that begin alike.
    `host_cache_gb`: host memory, in GB of 10^9 bytes, for pages that the device has no room for; of
    each rank, which keeps what its own device stored.
    `disk_cache_gb`: likewise in files of `disk_cache_dir` (None: what `disk_cache_folder` says), or
    of a folder in there for each of several ranks.
    `prefill_share`: of the rounds while prompts wait and answers are under way, what share prompts
    get: more shortens the time to a first token, less the time between tokens. `device`: auto takes
    a CUDA device if there is one. `graph`: auto takes a CUDA graph on a CUDA device and a tape on
    the CPU; eager runs the round's Python every time. `deterministic`: on a CUDA device, a
    request's every bit is the same whatever else is computed beside it, in prompts as in decoding;
    slower. On the CPU float64 serves that purpose. `load_format`: dummy reads config.json alone and
    draws random weights on the device, to measure speed; `model` may then also be a config.json by
    itself. `kernel_cache`: folder that keeps compiled kernels from one start to the next; None
    takes what `kernel_cache_folder` says. `max_grammars`: different grammars of structured output
    in use at one time; a request that brings one more waits. `grammar_seconds`: the most that
    compiling one may take. `guard`: count host reads in every round (the round itself is the same).
    `tp`: processes that share every layer of the model, each on a device of its own; on the CPU
    they share its cores. `dp`: copies of all but the routed experts, each shared by `tp` processes
    and with requests and caches of its own; `max_batch`, `prefill_batch` and `cache_bytes` are each
    copy's. Experts are spread over all processes. `ep`: they deal out the routed experts whole,
    rather than a stretch of each. `split_scan`: contexts of so many tokens or more have their index
    keys scored in parts by the processes of a copy, which exchange their best. `check_ranks`: after
    every round, compare what they decided; slow, to find faults. `canary`: check that pages, page
    tables and tokens are what the engine wrote. CANARY_ALL: all that the rows of a round hold,
    before it computes; a number: so many pages of each row and group in a decoding round, in turns;
    0: off. What is damaged is computed anew; with `strict`, its request ends with an error.
    `perturb`: damage something on purpose in one of so many rounds, as `perturb_seed` says. `role`:
    prefill computes prompts for other engines, decode fetches what these have computed, where a
    request says so. Pages travel from host memory to host memory, of which a role takes
    ROLE_CACHE_GB unless `host_cache_gb` says otherwise. `kv_*`: see WireSettings.
    """

    model: str
    speculate: int | str = 3
    drafter: str = "auto"
    device: str = "auto"
    graph: str = "auto"
    run_ahead: int = 2
    chunk: int = 256
    max_batch: int = 8
    prefill_batch: int = 2
    context_len: int | None = None
    page_size: int | None = None
    cache_bytes: int = 1 << 30
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    threads: int = 1
    prefix_cache: bool = True
    host_cache_gb: float = 0.0
    disk_cache_gb: float = 0.0
    disk_cache_dir: str | None = None
    prefill_share: float = 0.5
    deterministic: bool = False
    load_format: str = "safetensors"
    kernel_cache: str | None = None
    guard: bool = False
    max_grammars: int = 8
    grammar_seconds: float = 10.0
    tp: int = 1
    dp: int = 1
    ep: bool = False
    split_scan: int = 1 << 17
    check_ranks: bool = False
    canary: int | str = 0
    strict: bool = False
    perturb: int = 0
    perturb_seed: int = 0
    role: str | None = None
    kv_host: str = "127.0.0.1"
    kv_port: int = KV_PORT
    kv_wire: str = "auto"
    kv_peers: tuple[str, ...] = ()
    kv_seconds: float = 30.0
    kv_key_file: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path):
            raise ConfigError(f"model: must be a name or a folder, got {self.model!r}")
        if not isinstance(self.kernel_cache, str | None) or self.kernel_cache == "":
            raise ConfigError(f"kernel_cache: must be a folder, got {self.kernel_cache!r}")
        for name in ("guard", "deterministic", "prefix_cache", "ep", "check_ranks", "strict"):
            if not isinstance(vars(self)[name], bool):
                raise ConfigError(f"{name}: must be True or False, got {vars(self)[name]!r}")
        self._check_speculate()
        self._check_ranks()
        check_range("run_ahead", self.run_ahead, 0, MAX_RUN_AHEAD)
        check_range("chunk", self.chunk, MAX_VERIFY_WIDTH + 1, 1 << 16)
        check_range("max_batch", self.max_batch, 1, 1 << 12)
        check_range("prefill_batch", self.prefill_batch, 1, self.max_batch)
        check_range("threads", self.threads, 1, 1 << 10)
        check_range("cache_bytes", self.cache_bytes, 1, 1 << 50)
        check_range("max_grammars", self.max_grammars, 1, 256)
        self._check_tiers()
        self._check_canary()
        self._check_role()
        if not 0 < self.grammar_seconds <= 3600:
            raise ConfigError(
                f"grammar_seconds: must be above 0 and at most 3600, got {self.grammar_seconds!r}"
            )
        if isinstance(self.prefill_share, bool) or not 0 < self.prefill_share < 1:
            raise ConfigError(
                f"prefill_share: must be above 0 and below 1, got {self.prefill_share!r}"
            )
        if self.page_size is not None:
            check_range("page_size", self.page_size, 1, 1 << 12)
        if self.context_len is not None:
            check_range("context_len", self.context_len, 2, 1 << 24)
        check_choice("drafter", self.drafter, DRAFTERS)
        check_choice("device", self.device, DEVICES)
        check_choice("graph", self.graph, GRAPHS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)

    def _check_tiers(self) -> None:
        size = self.host_cache_gb
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 1 << 20:
            raise ConfigError(f"host_cache_gb: must be 0 to {1 << 20}, got {size!r}")
        if not 0 <= self.disk_cache_gb <= 1 << 20 or isinstance(self.disk_cache_gb, bool):
            raise ConfigError(f"disk_cache_gb: must be 0 to {1 << 20}, got {self.disk_cache_gb!r}")
        if self.disk_cache_gb and (not size or self.load_format == "dummy"):
            why = "lies below host memory; give host_cache_gb too"
            why = why if not size else "keeps what a model computed; dummy weights are drawn anew"
            raise ConfigError(f"disk_cache_gb: {why}")
        if self.disk_cache_dir is not None and not self.disk_cache_gb:
            raise ConfigError("disk_cache_dir: is for blocks in files; give disk_cache_gb as well")
        if size and not self.prefix_cache:
            raise ConfigError("host_cache_gb: holds cached prefixes, and prefix_cache is off")

    def _check_canary(self) -> None:
        if not isinstance(self.canary, str):
            check_range("canary", self.canary, 0, 1 << 16)
        elif self.canary != CANARY_ALL:
            rule = f"must be off, all, or pages a round from 1 to {1 << 16}"
            raise ConfigError(f"canary: {rule}; got {self.canary!r}")
        check_range("perturb", self.perturb, 0, 1 << 30)
        check_range("perturb_seed", self.perturb_seed, 0, (1 << 63) - 1)
        for name in ("strict", "perturb", "perturb_seed"):
            if vars(self)[name] and not self.canary:
                raise ConfigError(f"{name}: needs a canary; give canary as well")

    def check_deterministic(self, device: str) -> None:
        """Raise ConfigError where `deterministic` could not be kept."""
        if self.deterministic:
            check_deterministic(device, self.kv_cache_dtype)

    @property
    def watch(self) -> Watch | None:
        """What the canary is asked for; None without one."""
        if not self.canary:
            return None
        pages = None if isinstance(self.canary, str) else self.canary
        return Watch(pages, self.perturb, self.perturb_seed)

    def _check_role(self) -> None:
        check_role(self.role, self.wire, self.prefix_cache, self.tp * self.dp)

    @property
    def wire(self) -> WireSettings:
        """How this engine reaches others. Raises ConfigError."""
        own = (self.kv_host, self.kv_port, self.kv_wire, self.kv_peers, self.kv_seconds)
        return WireSettings(*own, self.kv_key_file)

    @property
    def host_gigabytes(self) -> float:
        """Host memory for blocks."""
        return self.host_cache_gb or (0.0 if self.role is None else ROLE_CACHE_GB)

    def _check_speculate(self) -> None:
        if self.speculate == "auto":
            return
        if isinstance(self.speculate, str):
            raise ConfigError(
                f"speculate: must be 0 to {MAX_DEPTH}, or auto, got {self.speculate!r}"
            )
        check_range("speculate", self.speculate, 0, MAX_DEPTH)

    def _check_ranks(self) -> None:
        check_range("tp", self.tp, 1, MAX_RANKS)
        check_range("dp", self.dp, 1, MAX_RANKS)
        check_range("split_scan", self.split_scan, 1, 1 << 30)
        if self.tp * self.dp == 1 and (self.ep or self.check_ranks):
            option = "ep" if self.ep else "check_ranks"
            raise ConfigError(f"{option}: is for several ranks; give tp or dp as well")

    def mesh(self, context: int, rank: int = 0) -> Mesh:
        """How processes share a model of `context` tokens, as `rank` of them sees it."""
        split = self.tp > 1 and context >= self.split_scan
        return Mesh(self.tp, rank, self.ep, self.dp, split)

    def ladder(self) -> ShapeLadder:
        """The rectangles that this engine runs: chunk widths up to `chunk`, which is the widest."""
        widths = (*(w for w in _WIDTHS if w < self.chunk), self.chunk)
        return ShapeLadder.build(
            self.max_batch, self.depth, widths, self.prefill_batch, self.depths
        )

    @property
    def depth(self) -> int:
        """Drafts of a round for whose depth nobody else decides."""
        return self.speculate if isinstance(self.speculate, int) else AUTO_START

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths among which rounds are chosen; none, where there is one for all."""
        return () if isinstance(self.speculate, int) else AUTO_DEPTHS


def find_model(name: str, load_format: str = "safetensors") -> Path:
    """The folder of a shipped model or of a path; with dummy weights, a config.json serves too.

    Raises CheckpointError if there is none.
    """
    if load_format == "dummy" and name.endswith(".json") and Path(name).expanduser().is_file():
        return Path(name).expanduser()
    if name in SHIPPED_MODELS:
        return Path(str(files("freewheel") / "checkpoints" / name))
    if name and _is_folder(name):
        return Path(name).expanduser()
    wrong = f"is neither a folder nor a shipped model ({', '.join(SHIPPED_MODELS)})"
    fix = "nothing is downloaded: give the folder of a model that is here"
    if name.endswith(".json") and os.path.exists(os.path.expanduser(name)):
        wrong = "is a file, and a folder is taken here"
        fix = "give the folder; `freewheel plan`, `simulate` and load_format='dummy' take a file"
    elif name.endswith(".json"):
        wrong = "does not exist"
    raise CheckpointError(f"model: {name!r} {wrong}; {fix}")


def check_conversion(model: str, out: Path, to: str) -> Path:
    """The folder of `model`, which is to be written to `out` with weights in `to`.

    Raises CheckpointError if there is none; ConfigError for a precision that is not known or a
    place that is taken.
    """
    folder = find_model(model)
    if to not in PRECISIONS:
        raise ConfigError(f"to: must be one of {', '.join(PRECISIONS)}; got {to!r}")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"out: {out} is there already; give a place that is not")
    return folder


CACHE_VARIABLES = ("FREEWHEEL_KERNEL_CACHE", "TRITON_CACHE_DIR")
"""Environment variables that name the folder of compiled kernels; the first that is set counts."""


def kernel_cache_folder(config: EngineConfig, decisions: Decisions) -> Path:
    """The folder that keeps compiled kernels; made if it is not there.

    The option, else the first of CACHE_VARIABLES that is set, else `freewheel/kernels` in the
    user's cache folder (XDG_CACHE_HOME, ~/.cache). Raises ConfigError if it cannot be made or
    written to: without it, every start would compile anew.
    """
    folder, reason = _named_cache_folder(config)
    decisions.note("kernel_cache", folder, reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"kernel_cache: {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"kernel_cache: {folder} cannot be written to; name another folder")
    return folder


def disk_cache_folder(config: EngineConfig, decisions: Decisions) -> Path:
    """The folder that keeps blocks of cached prefixes: the option, else `freewheel/blocks` in the
    user's cache folder."""
    if config.disk_cache_dir is not None:
        return Path(config.disk_cache_dir).expanduser()
    folder = _user_cache_folder() / "blocks"
    decisions.note("disk_cache_dir", folder, "blocks serve the next start too")
    return folder


def _user_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path(os.path.expanduser("~")) / ".cache"
    return home / "freewheel"


def _named_cache_folder(config: EngineConfig) -> tuple[Path, str]:
    if config.kernel_cache is not None:
        return Path(config.kernel_cache).expanduser(), "as asked for"
    for name in CACHE_VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser(), f"{name} says so"
    return _user_cache_folder() / "kernels", "compiled kernels serve the next start too"


@dataclass(frozen=True)
class Launched:
    """What a launcher said of this process: `rank` of `ranks`, the `local`-th on its machine."""

    rank: int
    ranks: int
    local: int


def launched_rank() -> Launched:
    """What torchrun says in the environment. Raises ConfigError if this is no process of it."""
    words = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    numbers = [int(word) for word in words if word is not None and word.isdecimal()]
    if len(numbers) < len(words):
        raise ConfigError(
            "worker: RANK, WORLD_SIZE and LOCAL_RANK are not set; start it with torchrun"
        )
    return Launched(*numbers)


def keep_to_loopback() -> None:
    """Processes of one machine talk over its loopback interface, unless the user named another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def rank_environment() -> dict[str, str]:
    """What other ranks need to find this very package, wherever it was imported from."""
    package = str(Path(__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}


def environment_api_key() -> str | None:
    """The key that clients of a server must show; arguments of a process are no place for it."""
    return os.environ.get(API_KEY_VARIABLE) or None


def _is_folder(name: str) -> bool:
    """Whether `name` is a folder that can be looked into."""
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError):  # a name too long, a folder above it closed; no such user
        return False
