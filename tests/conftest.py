# SPDX-License-Identifier: Apache-2.0
"""One verdict on one source, whatever the machine does beside: examples are the same each time.

`--hypothesis-profile=searching` looks for others.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("searching", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")
