"""What the operator tells Prometheus of itself; a job's own figures come from its coordinator."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

PASSES = Counter("ddpjob_passes", "Passes over jobs, by outcome", ["outcome"])
PASS_SECONDS = Histogram(
    "ddpjob_pass_seconds", "Duration of a pass over one job", buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
)
LEADING = Gauge("ddpjob_leading", "1 while this replica is the one that acts")
