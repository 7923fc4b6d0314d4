"""How each kernel of this package works: one printable record a compiled form.

The state merges that every kernels package has.
"""

from __future__ import annotations

from stream_attention.core.schedule import KernelSchedule
from stream_attention.core.state_schedules import state_schedules

TARGET = "sm_100a"
# `Arch::kMaxVectorBytes` and `Arch::kDependentLaunch` of csrc/arch.cuh.
MAX_VECTOR_BYTES, DEPENDENT_LAUNCH = 32, True

SCHEDULES: tuple[KernelSchedule, ...] = state_schedules(TARGET, MAX_VECTOR_BYTES, DEPENDENT_LAUNCH)
