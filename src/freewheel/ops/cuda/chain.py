# SPDX-License-Identifier: Apache-2.0
"""Kernels that start before the one in front of them ends (programmatic dependent launch).

A kernel launched with `launch_pdl=CHAINED` may begin as soon as every program of the kernel before
it has said so, or has ended. It waits before it touches anything that another kernel writes or
still reads; what it does until then is hidden: its own start, loading weights, and fetching more of
them towards the L2 cache. (So nothing may write a weight right in front of its use: weights are
loaded before rounds begin.) The wait is over when the kernel in front has ended, and everything
before that one with it, because each chained kernel waits in every program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAINED = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Whether kernels are launched so: on Hopper and later."""


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Let the next kernel begin, then wait for the end of the one before.

    For kernels that leave the memory idle. Those that stream weights wait first, and let the next
    one begin when their own loads are done: what it fetches would else drive out theirs.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Wait for the end of the kernel before."""
    if CHAINED:
        gdc_wait()


@triton.jit
def release(CHAINED: tl.constexpr):
    """Let the next kernel begin."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def fetch(start, SIZE: tl.constexpr, THREADS: tl.constexpr):
    """Bring `SIZE` contiguous elements from `start` on towards the L2 cache, without waiting.

    Each of the program's threads asks for a share, which must be a multiple of 16 bytes. It pays
    for a few megabytes. Of a large weight, lines arrive in no order, and a loop over it waits for
    nearly all of them before it begins.
    """
    share: tl.constexpr = SIZE // THREADS
    size: tl.constexpr = share * (start.dtype.element_ty.primitive_bitwidth // 8)
    tl.static_assert(size % 16 == 0)
    own = start + tl.arange(0, THREADS) * share
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [own, tl.full((THREADS,), size, tl.int32)], tl.int32, False, 1,
    )  # fmt: skip
