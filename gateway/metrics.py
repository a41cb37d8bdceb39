"""What is counted, for Prometheus.

Everything is counted on the event loop's thread. The gap between two steps is the one figure taken
per token step, so it has a histogram of its own that costs a tenth of the library's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.api import EngineStats, SpeculationStats
from parsers.report import Report

#: Seconds; from one step of a fast GPU to a reader's patience.
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
#: Gaps that are noted before they are counted, all at once for less.
_NOTED = 512
#: Names that clients make up are counted one by one up to here, then together.
MOST_NAMES = 100
#: Characters of a name that is counted by itself.
LONGEST_NAME = 64
OTHER = "(other)"


class Metrics:
    """The counters of one server.

    Args:
        stats: takes a snapshot of the backend's own counters.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = self._counter(
            "http_requests", "Replies by route and status.", "route", "method", "status"
        )
        self.seconds = Histogram(
            "bathyal_request_seconds",
            "From the request's first byte to the reply's last, of generating routes.",
            ["route"],
            buckets=_WAITS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "bathyal_time_to_first_token_seconds",
            "From the accepted request to the first step of its reply.",
            buckets=_WAITS,
            registry=self.registry,
        )
        self.gaps = Gaps()
        self.registry.register(self.gaps)
        self.registry.register(_BackendStats(stats))
        self.open = Gauge(
            "bathyal_open_requests", "Generating requests that are open.", registry=self.registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of begun replies.")
        self.cached_tokens = self._counter("cached_tokens", "Those that were not computed again.")
        self.completion_tokens = self._counter("completion_tokens", "Tokens of replies.")
        self.refused = self._counter("refused_requests", "Requests refused, by code.", "code")
        self.aborted = self._counter(
            "aborted_replies", "Replies that ended before the model did, by cause.", "cause"
        )
        self.calls = self._counter("calls", "Tool calls by the gate's verdict.", "verdict")
        for verdict in ("delivered", "withheld", "repaired", "undeclared"):
            self.calls.labels(verdict)  # listed from the start, at 0
        self.withheld = self._counter("withheld_calls", "Calls not delivered, by rule.", "rule")
        self.repaired = self._counter("repaired_calls", "Calls mended, by rule.", "rule")
        self.violations = self._counter("schema_violations", "Calls and answers off their schema.")
        self.unmet = self._counter("unmet_demands", "Demands a reply did not meet.", "demand")
        self.lost = self._counter("lost_characters", "Text a protocol has no place for.")
        self.quoted = self._counter("quoted_markers", "Markers shown as text.")
        self.ignored = self._counter(
            "ignored_fields", "Request fields without effect, by name.", "field"
        )
        self._names: set[str] = set()

    def text(self) -> bytes:
        """Write everything in Prometheus' text form."""
        return generate_latest(self.registry)

    def take_report(self, report: Report) -> None:
        """Count what the gate did to one reply."""
        if report.calls:
            self.calls.labels("delivered").inc(report.calls)
        if report.withheld:
            self.calls.labels("withheld").inc(len(report.withheld))
        if report.repaired:
            self.calls.labels("repaired").inc(len(report.repaired))
        if report.flagged:
            self.calls.labels("undeclared").inc(len(report.flagged))
        for withheld in report.withheld:
            self.withheld.labels(withheld.reason).inc()
        for repaired in report.repaired:
            self.repaired.labels(repaired.rule).inc()
        self.violations.inc(len(report.violations))
        self.lost.inc(report.lost_chars)
        self.quoted.inc(report.quoted_markers)
        if report.unmet:
            self.unmet.labels(report.unmet).inc()

    def take_ignored(self, names: Iterable[str]) -> None:
        """Count fields without effect; a client that makes up names fills no memory."""
        for name in names:
            if name not in self._names:
                if len(self._names) >= MOST_NAMES or len(name) > LONGEST_NAME:
                    name = OTHER
                else:
                    self._names.add(name)
            self.ignored.labels(name).inc()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"bathyal_{name}", about, labels, registry=self.registry)


class Gaps(Collector):
    """A histogram of the seconds between two steps of a reply, for one thread."""

    _NAME = "bathyal_inter_token_seconds"
    _ABOUT = "Between two steps of a reply (a step holds one token or more)."

    def __init__(self) -> None:
        self._counts = [0] * (len(_GAPS) + 1)
        self._sum = 0.0
        self._noted: list[float] = []  # not in the counts yet

    def add(self, seconds: float) -> None:
        """Count one gap."""
        self._noted.append(seconds)
        if len(self._noted) >= _NOTED:
            self._settle()

    def _settle(self) -> None:
        noted, self._noted = self._noted, []
        self._sum += sum(noted)
        for seconds in noted:
            self._counts[bisect_left(_GAPS, seconds)] += 1

    def collect(self) -> Iterable[Metric]:
        """Give the histogram as Prometheus wants it: every bucket with those below it."""
        self._settle()
        total, buckets = 0, []
        for edge, count in zip((*map(str, _GAPS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((edge, total))
        yield HistogramMetricFamily(self._NAME, self._ABOUT, buckets, self._sum)


#: Field of ExpertStats -> what it says.
_EXPERTS = {
    "hits": "Routed experts that were found on the device.",
    "misses": "Routed experts that came from the host.",
    "bytes_copied": "Bytes of experts that came.",
    "waves": "Sets of experts that were computed together, all layers.",
    "prefetched": "Experts that came ahead by a guess.",
    "prefetch_hits": "Those of them that were asked for next.",
}


class _BackendStats(Collector):
    """The backend's own counters, read when they are asked for."""

    _GAUGES = ("running", "waiting", "free_blocks", "total_blocks", "cached_blocks", "snapshots")
    _COUNTERS = ("steps", "preemptions", "prefix_hits", "evictions")

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Name nothing: a backend need not be running when it is registered."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Take a snapshot."""
        stats = self._stats()
        for name in self._GAUGES:
            about = f"{name.replace('_', ' ').capitalize()} of the backend."
            yield GaugeMetricFamily(f"bathyal_backend_{name}", about, getattr(stats, name))
        for name in self._COUNTERS:
            about = f"{name.capitalize()} of the backend."
            yield CounterMetricFamily(f"bathyal_backend_{name}", about, getattr(stats, name))
        tail = CounterMetricFamily(
            "bathyal_backend_tail_rows",
            "Rows of prompts at the backend's last layers, by mode: processed, or left out.",
            labels=("prefill", "rows"),
        )
        for mode, processed, left_out in stats.tail_rows:
            tail.add_metric((mode, "processed"), processed)
            tail.add_metric((mode, "left_out"), left_out)
        yield tail
        yield from _speculation(stats.speculation)
        for name, about in _EXPERTS.items():
            value = getattr(stats.experts, name)
            yield CounterMetricFamily(f"bathyal_backend_expert_{name}", about, value)
        yield GaugeMetricFamily(
            "bathyal_backend_alive", "Whether the backend serves.", int(stats.alive)
        )


def _speculation(stats: SpeculationStats) -> Iterable[Metric]:
    """Drafts of the backend, and how long the runs of tokens are that it takes of them."""
    yield CounterMetricFamily(
        "bathyal_backend_drafted_tokens", "Tokens the backend drafted.", stats.drafted
    )
    yield CounterMetricFamily(
        "bathyal_backend_accepted_tokens",
        "Those of them that the model's own draws agreed with.",
        stats.accepted,
    )
    total, buckets = 0, []
    for length, count in enumerate(stats.lengths, 1):
        total += count
        buckets.append((str(length), total))
    yield HistogramMetricFamily(
        "bathyal_backend_acceptance_length",
        "Tokens of a verification: accepted ones and the one drawn after them.",
        [*buckets, ("+Inf", total)],
        total + stats.accepted,
    )
    plain = CounterMetricFamily(
        "bathyal_backend_plain_rows",
        "Decode rows that took no part in speculation, by reason.",
        labels=["reason"],
    )
    for reason, rows in stats.plain_rows.items():
        plain.add_metric([reason], rows)
    yield plain
