# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault that somebody thought of: what is told to whom, and how soon it is over.

`python -m tests.faults.kinds` writes the list in docs/faults.md anew.
"""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from freewheel.errors import FreewheelError
from freewheel.spec import FinishReason
from tests.faults import line, pages, processes, rounds, server
from tests.faults.rounds import BIASED, NESTED, in_a_round
from tests.faults.seen import (
    ENGINE_ERROR,
    ENGINE_LOST,
    NOT_READY,
    REFUSED,
    SAME,
    Kind,
)
from tests.faults.server import unstartable

LIST = Path(__file__).parents[2] / "docs" / "faults.md"
BEGINS, ENDS = "| fault | its request | others | over within |\n", "\n\n"

IN_A_ROUND = (
    Kind("NaN logits in one row",
         in_a_round(rounds.nan_logits, FinishReason.ERROR, BIASED), ENGINE_ERROR, within=60),
    Kind("NaN in what a row attends to",
         in_a_round(rounds.nan_in_cache, FinishReason.ERROR), ENGINE_ERROR, within=60),
    Kind("NaN in a kept prompt", rounds.nan_in_a_kept_prompt, ENGINE_ERROR, within=120,
         when="the third request behind it", rare=True),
    Kind("kernel error",
         in_a_round(rounds.raising(lambda: RuntimeError("CUDA error: an illegal memory access")),
                    RuntimeError), ENGINE_LOST, SAME, 60),
    Kind("no device memory",
         in_a_round(rounds.raising(lambda: torch.OutOfMemoryError("CUDA out of memory")),
                    RuntimeError), ENGINE_LOST, SAME, 60),
    Kind("no host memory", in_a_round(rounds.raising(MemoryError), MemoryError),
         ENGINE_LOST, SAME, 60),
    Kind("interrupt", in_a_round(rounds.raising(KeyboardInterrupt), KeyboardInterrupt),
         ENGINE_LOST, SAME, 60),
    Kind("lost letter", in_a_round(rounds.lost_letter, FreewheelError), ENGINE_LOST, SAME, 60),
    Kind("letter that cannot be",
         in_a_round(rounds.letters(rounds.impossible_letter), FreewheelError),
         ENGINE_LOST, SAME, 60),
    Kind("late letter", in_a_round(rounds.letters(rounds.late_letter), None), "nothing",
         within=60),
    Kind("no device memory at the start", rounds.no_memory_at_the_start(torch.OutOfMemoryError),
         NOT_READY, SAME, 120, when="the next start"),
    Kind("no host memory at the start", rounds.no_memory_at_the_start(MemoryError),
         NOT_READY, SAME, 120, when="the next start"),
)  # fmt: skip

IN_WHAT_IS_KEPT = (
    Kind("a bit turns over in a page, a page table or a row's tokens, with `--canary all`",
         pages.damage, "nothing", within=300, when="the same round"),
    Kind("the same, with `--strict`", pages.strict_canary, ENGINE_ERROR, within=60,
         when="the same round"),
    Kind("the same again and again, no token between", pages.struck_without_end, ENGINE_ERROR,
         within=120, when="the 33rd time"),
    Kind("files of the disk cache changed", pages.harmed_files("flip"), "nothing", within=120,
         when="at once: computed anew"),
    Kind("files of the disk cache gone", pages.harmed_files("remove"), "nothing", within=120,
         when="at once: computed anew"),
    Kind("the disk of the disk cache full", pages.full_disk, "nothing", within=120,
         when="at once: computed anew"),
)  # fmt: skip

KILLED, STILL = signal.SIGKILL, signal.SIGSTOP
NO_ANSWER = processes.NO_ANSWER

IN_OTHER_PROCESSES = (
    Kind("guide killed", in_a_round(rounds.to_guides(KILLED), None, NESTED), "nothing",
         within=120, rare=True),
    Kind("guide stands still, for `--grammar-seconds`",
         in_a_round(rounds.to_guides(STILL), FinishReason.ERROR, NESTED), ENGINE_ERROR,
         within=120, rare=True),
    Kind("compiler killed", rounds.compiler_is_sent(KILLED), REFUSED, within=120, rare=True),
    Kind("compiler stands still", rounds.compiler_is_sent(STILL), REFUSED, within=120, rare=True),
    Kind("one of these ends before it answers", processes.misbehaves("ends"), NO_ANSWER,
         within=120),
    Kind("says half a line", processes.misbehaves("half a line"), NO_ANSWER, within=120),
    Kind("says half of a mask", processes.misbehaves("half of the bytes"), NO_ANSWER, within=120),
    Kind("says what is no JSON", processes.misbehaves("no JSON"), NO_ANSWER, within=120),
    Kind("hangs before it answers", processes.misbehaves("hangs"), NO_ANSWER, within=120),
    Kind("hangs within a mask", processes.misbehaves("hangs within"), NO_ANSWER, within=120),
    Kind("closes its output and stays", processes.misbehaves("closes its output"), NO_ANSWER,
         within=120),
    Kind("no file descriptor to start one with", processes.no_file_descriptors, REFUSED,
         within=120),
    Kind("engine dies while a grammar compiles", processes.engine_dies_while_compiling,
         ENGINE_LOST, SAME, 120),
    Kind("prompt renderer killed", processes.renderer_is_sent(KILLED), REFUSED, "wait as long",
         60, when="the next prompt"),
    Kind("prompt renderer stands still, for 6 s", processes.renderer_is_sent(STILL), REFUSED,
         "wait as long", 60, when="the next prompt"),
    Kind("no process to be had for a renderer", processes.no_renderer, "503 for a chat",
         within=60, when="as soon as there is one"),
)  # fmt: skip

OUT_OF_FILES = OSError(24, "Too many open files")

BETWEEN = (
    Kind("bad frame", line.broken("bad frame"), ENGINE_LOST, SAME, 120),
    Kind("frame of an unknown kind", line.broken("unknown frame"), ENGINE_LOST, SAME, 120),
    Kind("report of a wrong shape", line.broken("wrong report"), ENGINE_LOST, SAME, 120),
    Kind("engine ends by itself", line.broken("ends"), ENGINE_LOST, SAME, 120),
    Kind("engine aborts", line.broken("aborts"), ENGINE_LOST, SAME, 120),
    Kind("engine hangs, for `--stall-seconds`", line.broken("hangs"), ENGINE_LOST, SAME, 120),
    Kind("engine ends at its start", line.slow_start("ends"), NOT_READY, SAME, 120,
         when="the next start"),
    Kind("engine runs out of memory at its start", line.slow_start("no memory"), NOT_READY, SAME,
         120, when="the next start"),
    Kind("engine hangs at its start", line.slow_start("hangs"), NOT_READY, SAME, 120,
         when="the next start"),
    Kind("checkpoint damaged between restarts; the log and the admin socket say why",
         line.damaged_checkpoint, NOT_READY, SAME, 120, when="30 s after it is mended"),
    Kind("the HTTP process stood still, or the machine slept", line.stood_still, "nothing",
         within=120),
    Kind("the clock jumps forward by a day", line.clock_jumps(86400.0), "nothing", within=120),
    Kind("the clock jumps back by a day", line.clock_jumps(-86400.0), "nothing", within=120),
    Kind("folder of temporary files cleared; the next engine gets another", line.cleared_folder,
         "nothing", within=120),
    Kind("no file descriptor for the next engine", line.no_process(OUT_OF_FILES), NOT_READY, SAME,
         120),
    Kind("no memory for the next engine's process", line.no_process(OSError(12, "No memory")),
         NOT_READY, SAME, 120),
    Kind("disk full for a dump: none, and none by half", line.dump("full"), ENGINE_LOST, SAME,
         120),
    Kind("no folder any more for a dump: none", line.dump("none"), ENGINE_LOST, SAME, 120),
)  # fmt: skip

OPTION = server.EXIT

AROUND_A_SERVER = (
    Kind("port taken", unstartable("--port: cannot listen", "--port", "{port}"), OPTION),
    Kind("unreadable key file", unstartable("--api-key-file:", "--api-key-file", "{folder}/none"),
         OPTION),
    Kind("a folder in place of a key file",
         unstartable("--api-key-file:", "--api-key-file", "{folder}"), OPTION),
    Kind("no folder for dumps", unstartable("--dump-dir:", "--dump-dir", "{folder}/none"), OPTION),
    Kind("engine option out of range", unstartable("--page-size: must be", "--page-size", "0"),
         OPTION),
    Kind("cache too small for a page", unstartable("--cache-bytes:", "--cache-bytes", "4096"),
         OPTION),
    Kind("admin socket taken", unstartable("--admin-socket:", "--admin-socket", "{folder}"),
         OPTION),
    Kind("slow reader", server.slow_reader, "ends after 60 s"),
    Kind("HTTP process killed; no process is left", server.server_killed, server.ENDS, SAME, 120,
         rare=True),
    Kind("a storm of signals; no process and no folder is left", server.storm_of_signals,
         server.ENDS, SAME, 120, rare=True),
    Kind("rank killed under `--tp`", server.lost_rank, ENGINE_LOST, SAME, 300, rare=True),
    Kind("admin socket removed", server.admin_socket_removed, "nothing", within=120, slow=True),
    Kind("HTTP process stopped and continued", server.stopped_and_continued, "nothing", within=120,
         slow=True),
    Kind("no file descriptors for connections; open streams go on", server.no_file_descriptors,
         "nothing", "new ones wait", 120, slow=True),
    Kind("engine killed by SIGKILL, and the disk full for its dump",
         server.engine_is_sent(KILLED, full=True), ENGINE_LOST, SAME, 300, slow=True),
    Kind("engine killed by SIGSEGV", server.engine_is_sent(signal.SIGSEGV), ENGINE_LOST, SAME,
         300, rare=True),
    Kind("engine killed by SIGTERM", server.engine_is_sent(signal.SIGTERM), ENGINE_LOST, SAME,
         300, rare=True),
    Kind("engine stopped by SIGSTOP, for `--stall-seconds`", server.engine_is_sent(STILL),
         ENGINE_LOST, SAME, 300, rare=True),
    Kind("too much to do", server.too_much_to_do, server.FULL, within=300),
    Kind("client leaves, within any kind of stream", server.clients_leave, "nothing", within=300,
         rare=True),
    Kind("SIGTERM, and answers longer than `--drain-seconds`", server.server_ends, server.ENDING,
         SAME, 120, rare=True),
)  # fmt: skip

GROUPS = {
    "in a round": IN_A_ROUND,
    "in what is kept": IN_WHAT_IS_KEPT,
    "in processes for grammars and prompts": IN_OTHER_PROCESSES,
    "between the two processes": BETWEEN,
    "around a server": AROUND_A_SERVER,
}
"""In the order in which they strike: the last ends the server that the others struck."""

KINDS = tuple(kind for group in GROUPS.values() for kind in group)


def table() -> str:
    """The list, as docs/faults.md has it."""
    rows = [BEGINS.rstrip(), "|---|---|---|---|"]
    for name, group in GROUPS.items():
        rows += [f"| **{name}** | | | |", *(kind.line for kind in group)]
    return "\n".join(rows) + ENDS


def with_table(text: str) -> str:
    """`text` with the list in the place of its own. Raises ValueError if it has none."""
    first = text.index(BEGINS)
    last = text.index(ENDS, first) + len(ENDS)
    return text[:first] + table() + text[last:]


if __name__ == "__main__":
    LIST.write_text(with_table(LIST.read_text("utf-8")), "utf-8")
