"""Shared by all tests: hypothesis profiles and one torch thread per process."""

import os

from hypothesis import HealthCheck, settings

# the suite runs beside other work on two cores; timing is nobody's assertion
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
