# SPDX-License-Identifier: Apache-2.0
"""How fast a model's weights reach their device, against how fast their files can be read at all.

    python benchmarks/bench_load.py [--gigabytes 20] [--shard 4] [--device cuda] [--tp N]
        [--folder DIR]

A folder of DeepSeek-V3.2's names and dimensions is written (or used again, if `--folder` holds one
already), with as many experts as the size asks for, one tensor each as they are released; its
numbers are random bits. What was just written lies in the page cache, so no disk is measured.

`raw`: the files read into one buffer of host memory, by as many threads as the loader uses and by
16. `copy`: page-locked memory to the device, with nothing read. `staged`: both together, for each
of `--threads` and `--buffer-mb`, into one place on the device. `load`: `load_folder`, from headers
to the last byte on the device; twice, the second with a device that is open and memory that is
mapped. `host memory`: what the process held at most beyond what it held before the load, against
the largest file. No load can be faster than the slower of `raw` and `copy`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from freewheel.models import load_folder, open_dummy, open_folder
from freewheel.models.staging import BUFFER_BYTES, READ_THREADS, gpu_reader
from freewheel.spec.mesh import ALONE, Mesh

CONFIG = Path(__file__).parent / "configs" / "v32_tp8shard.json"
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
PIECE = 64 << 20
GB = 10**9

Shapes = dict[str, tuple[int, ...]]


def configured(total: int, hidden: int, width: int) -> dict[str, Any]:
    """A config.json with three layers of experts that take `total` bytes of bfloat16 together."""
    config = json.loads(CONFIG.read_text("utf-8"))
    experts = max(16, 8 * round(total / (3 * 3 * 2 * hidden * width * 8)))
    return config | {
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": experts,
    }


def wanted(config: Path) -> Shapes:
    """Every tensor that a released checkpoint of this configuration has: each expert by itself."""
    shapes: Shapes = {}
    for name, stored in open_dummy(config).tensors.items():
        if not name.endswith(EXPERTS):
            shapes[name] = stored.shape
            continue
        base, _, kind = name.rpartition(".")
        count, rows, columns = stored.shape
        for expert in range(count):
            if kind == "down_proj":
                shapes[f"{base}.{expert}.down_proj.weight"] = (rows, columns)
                continue
            for part in ("gate_proj", "up_proj"):
                shapes[f"{base}.{expert}.{part}.weight"] = (rows // 2, columns)
    return shapes


def shards(shapes: Shapes, most: int) -> Iterator[Shapes]:
    """The tensors in files of up to `most` bytes."""
    shard: Shapes = {}
    size = 0
    for name, shape in shapes.items():
        own = 2 * math.prod(shape)
        if shard and size + own > most:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += own
    yield shard


def write_shard(file: Path, shapes: Shapes, noise: bytes) -> None:
    """A safetensors file of bfloat16 tensors, filled with `noise` again and again."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        view = memoryview(noise)
        for start in range(0, at, len(noise)):
            out.write(view[: min(len(noise), at - start)])


def write_folder(
    folder: Path, total: int, shard: int, hidden: int = 7168, width: int = 2048
) -> None:
    """Write config.json and about `total` bytes of weights, in files of up to `shard` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(configured(total, hidden, width)), "utf-8")
    parts = list(shards(wanted(config), shard))
    noise = os.urandom(PIECE)
    names = [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    with ThreadPoolExecutor(8) as pool:
        files = [folder / name for name in names]
        list(pool.map(write_shard, files, parts, [noise] * len(parts)))
    index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), "utf-8")


def read_rate(files: Iterable[Path], threads: int) -> float:
    """Bytes a second at which all files are read into one buffer."""
    view, share = memoryview(bytearray(PIECE)), PIECE // threads
    total, begin = 0, time.perf_counter()

    def read(descriptor: int, part: int, offset: int) -> int:
        return os.preadv(descriptor, [view[part * share :][:share]], offset + part * share)

    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            for offset in range(0, file.stat().st_size, PIECE):
                parts = range(threads)
                jobs = [pool.submit(read, descriptor, part, offset) for part in parts]
                total += sum(job.result() for job in jobs)
            os.close(descriptor)
    return total / (time.perf_counter() - begin)


def copy_rate(size: int = 8 << 30) -> float:
    """Bytes a second from page-locked memory to the device, in the loader's pieces."""
    source = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(size // BUFFER_BYTES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return size / (time.perf_counter() - begin)


def staged_rate(folder: Path, threads: int, buffer: int) -> float:
    """Bytes a second through the loader's buffers, every tensor to the same place."""
    tensors = open_folder(folder).tensors.values()
    place = torch.empty(max(t.size for t in tensors), dtype=torch.uint8, device="cuda")
    reader = gpu_reader(place.numel(), buffer, threads)
    begin = time.perf_counter()
    for begun in [reader.begin(stored, place[: stored.size]) for stored in tensors]:
        reader.settle(begun)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    reader.close()
    return sum(stored.size for stored in tensors) / seconds


def held(kind: str) -> int:
    """Bytes of host memory that this process has now (VmRSS), or had at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"this system does not tell {kind}")


def load(folder: Path, device: str, mesh: Mesh = ALONE) -> dict[str, float]:
    """Load once; rate and time from headers to the last byte, and host memory beyond before."""
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # VmHWM counts from here
    begin = time.perf_counter()
    loaded = load_folder(
        open_folder(folder), torch.bfloat16, device=device, positions=4096, mesh=mesh
    )
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "bytes_per_second": loaded.report.read_bytes / seconds,
        "host_bytes": held("VmHWM") - before,
    }


def measure(
    folder: Path, device: str, threads: Sequence[int], buffers: Sequence[int], tp: int = 1
) -> dict[str, Any]:
    """All figures of one folder."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    raw = {str(n): read_rate(files, n) for n in dict.fromkeys((1, READ_THREADS, 16))}
    bounds = [max(raw.values())]
    staged: dict[str, float] = {}
    if device == "cuda":
        bounds.append(copy_rate())
        staged = {
            f"{n} threads, {size >> 20} MiB": staged_rate(folder, n, size)
            for n in threads
            for size in buffers
        }
    loads = [load(folder, device, Mesh(tp, tp // 2)) for _ in range(2)]
    best = max(one["bytes_per_second"] for one in loads)
    return {
        "bytes": sum(sizes),
        "files": len(files),
        "largest_file": max(sizes),
        "raw_bytes_per_second": raw,
        "copy_bytes_per_second": bounds[1:],
        "staged_bytes_per_second": staged,
        "loads": loads,
        "share_of_raw": best / bounds[0],
        "share_of_bound": best / min(bounds),
    }


def report(found: dict[str, Any]) -> None:
    print(f"{found['bytes'] / GB:.1f} GB in {found['files']} files", flush=True)
    for threads, rate in found["raw_bytes_per_second"].items():
        print(f"raw, {threads:>2} threads   {rate / GB:6.2f} GB/s")
    for rate in found["copy_bytes_per_second"]:
        print(f"copy              {rate / GB:6.2f} GB/s")
    for how, rate in found["staged_bytes_per_second"].items():
        print(f"staged            {rate / GB:6.2f} GB/s  {how}")
    for one in found["loads"]:
        rate, most = one["bytes_per_second"] / GB, one["host_bytes"] / found["largest_file"]
        print(
            f"load              {rate:6.2f} GB/s  {one['seconds']:.2f} s; host memory "
            f"{one['host_bytes'] / GB:.2f} GB, {most:.2f} of the largest file"
        )
    print(f"best load / best raw {found['share_of_raw']:.0%}")
    print(f"best load / slower of raw and copy {found['share_of_bound']:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Rate of loading against rate of reading.")
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--shard", type=float, default=4, help="Gigabytes of a file, at most.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", default=str(READ_THREADS), help="Of `staged`.")
    parser.add_argument("--buffer-mb", default=str(BUFFER_BYTES >> 20), help="Of `staged`.")
    parser.add_argument("--tp", type=int, default=1, help="Load what one of so many ranks holds.")
    parser.add_argument("--folder", type=Path, help="Write there and keep it.")
    parser.add_argument("--write-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = options.folder or Path(own)
        if not (folder / "model.safetensors.index.json").is_file():
            write_folder(folder, int(options.gigabytes * GB), int(options.shard * GB))
        if options.write_only:
            return
        threads = [int(n) for n in options.threads.split(",")]
        buffers = [int(n) << 20 for n in options.buffer_mb.split(",")]
        found = measure(folder, options.device, threads, buffers, options.tp)
    if options.json:
        json.dump(found, sys.stdout)
        print()
    else:
        report(found)


if __name__ == "__main__":
    main()
