# SPDX-License-Identifier: Apache-2.0
"""Kernels that start before the one in front of them ends (programmatic dependent launch).

A kernel launched with `launch_pdl=CHAINED` may begin as soon as every program of the kernel before
it has said so, or has ended. It waits before it touches anything that another kernel writes or
still reads; what it does until then is hidden: its own start, and loading weights. (So nothing may
write a weight right in front of its use: weights are loaded before rounds begin.) The wait is over
when the kernel in front has ended, and everything before that one with it, because each chained
kernel waits in every program.

Weights are best loaded into registers: there they are ready. Brought no nearer than the L2 cache
they arrive in no order, and the loop behind the wait waits for nearly all of them. What an earlier
kernel wrote may be read in front of the wait too, if the kernel in between waits for it before it
lets this one begin; past the first cache, which may hold what lay there earlier.
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
