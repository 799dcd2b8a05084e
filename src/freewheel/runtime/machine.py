# SPDX-License-Identifier: Apache-2.0
"""What a measurement must say of the machine that it was made on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """`processor`: the GPU's name, or the CPU's as far as Python knows it. `threads`: PyTorch's."""

    device: str
    processor: str
    threads: int
    cores: int | None
    python_version: str
    torch_version: str

    @classmethod
    def here(cls, device: str) -> Machine:
        """This machine, for an engine on `device`: "cpu" or "cuda"."""
        cpu = platform.processor() or platform.machine()
        return cls(
            device=device,
            processor=torch.cuda.get_device_name() if device == "cuda" else cpu,
            threads=torch.get_num_threads(),
            cores=os.cpu_count(),
            python_version=platform.python_version(),
            torch_version=str(torch.__version__),
        )
