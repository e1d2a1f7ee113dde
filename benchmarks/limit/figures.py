"""From an outcome to figures with their aims: for people as tables, for scripts as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.limit.contest import (
    ALONE,
    ARRIVAL_ORDER,
    BY_LENGTH,
    IN_FLIGHT,
    LOADS,
    ORACLE,
    SINGLE,
    Outcome,
)
from benchmarks.report import Figure, Report

BEST = "in-process slots"
WORKERS = "two workers"
HOT = "static shapes"
AIM_EFFICIENCY = {256: 0.95, 64: 0.90}
AIM_VS_ARRIVAL_ORDER = 3.0
AIM_VS_SINGLE = {"lognormal": 1.3, "docstrings": 1.15}
QUANTILES = (50, 95, 99)


def ratio(outcome: Outcome, way: str, other: str) -> float:
    """The median of the rounds' ratios of tokens per second."""
    pairs = zip(outcome.tokens_per_s[way], outcome.tokens_per_s[other], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def plain(outcome: Outcome) -> dict[str, Any]:
    """Everything, for a script."""
    best = f"{BEST}, 256"
    found: dict[str, Any] = {
        "efficiency": ratio(outcome, best, ORACLE),
        "efficiency_64": ratio(outcome, f"{BEST}, 64", ORACLE),
        "efficiency_workers": ratio(outcome, f"{WORKERS}, 256", ORACLE),
        "efficiency_workers_64": ratio(outcome, f"{WORKERS}, 64", ORACLE),
        "speedup_vs_arrival_order": ratio(outcome, best, ARRIVAL_ORDER),
        "speedup_vs_single": ratio(outcome, best, SINGLE),
        "speedup_vs_by_length": ratio(outcome, best, BY_LENGTH),
        "oracle_vs_single": ratio(outcome, ORACLE, SINGLE),
        "p99_ratio_vs_single": _p99_ratios(outcome, ALONE),
        "p99_ratio_vs_single_in_process": _p99_ratios(outcome, SINGLE),
        "padding_ratio": _median(outcome, best, "padding_ratio"),
        "padding_ratio_64": _median(outcome, f"{BEST}, 64", "padding_ratio"),
        "oracle_padding_ratio": outcome.oracle_padding_ratio,
        "requests": len(outcome.trace),
        "tokens": outcome.trace.tokens,
        "rounds": len(outcome.tokens_per_s[ORACLE]),
        "answers_checked": outcome.checked,
        "tokens_per_s": {way: statistics.median(rates) for way, rates in outcome.tokens_per_s.items()},
        "efficiency_by_round": {
            way: [mine / oracle for mine, oracle in zip(rates, outcome.tokens_per_s[ORACLE], strict=True)]
            for way, rates in outcome.tokens_per_s.items()
        },
        "runs": {
            way: {
                name: _median(outcome, way, name)
                for name in (
                    "padding_ratio",
                    "mean_batch",
                    "slots_busy",
                    "server_cpu_s",
                    "client_cpu_s",
                    "seconds",
                )
            }
            for way in outcome.runs
        },
        "latency_ms": {
            f"{load:.0%}": {
                way: {f"p{q}": quantile_ms(outcome.latency_s[at, way], q) for q in QUANTILES}
                for at, way in outcome.latency_s
                if at == load
            }
            for load in LOADS
        },
        "cpu_us_per_token": {way: statistics.median(us) for way, us in outcome.cpu_us.items()},
        "settings": outcome.settings,
    }
    if f"{HOT}, 256" in outcome.runs:
        found["efficiency_static"] = ratio(outcome, f"{HOT}, 256", ORACLE)
        found["efficiency_static_64"] = ratio(outcome, f"{HOT}, 64", ORACLE)
    return found


def _cpu_ratio(outcome: Outcome, way: str) -> float:
    """CPU per token / the oracle's, in the same round: what a busy machine falsifies least."""
    pairs = zip(outcome.cpu_us[way], outcome.cpu_us[ORACLE], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def quantile_ms(latency_s: Sequence[float], percent: float) -> float:
    """In milliseconds."""
    return float(np.percentile(latency_s, percent)) * 1e3


def _p99_ratios(outcome: Outcome, other: str) -> dict[str, float]:
    """By load in percent; empty where no latencies were measured."""
    return {
        f"{100 * load:.0f}": quantile_ms(outcome.latency_s[load, BEST], 99)
        / quantile_ms(outcome.latency_s[load, other], 99)
        for load in LOADS
        if outcome.latency_s
    }


def _median(outcome: Outcome, way: str, name: str) -> float:
    return float(statistics.median(getattr(run, name) for run in outcome.runs[way]))


def throughput(outcome: Outcome) -> Report:
    """A row per way."""
    trace = outcome.trace
    mean_tokens = trace.tokens / len(trace)
    report = Report(
        title=f"{trace.name}: {len(trace)} sentences, {mean_tokens:.0f} tokens on average; saturated",
        columns=(
            "way",
            "/ oracle",
            "/ single",
            "/ sorted",
            "/ arrival",
            "CPU",
            "padding",
            "batch",
            "busy",
            "per s",
        ),
    )
    for way, rates in outcome.tokens_per_s.items():
        aimed = way.startswith(BEST)
        in_flight = next((number for number in IN_FLIGHT if way.endswith(f", {number}")), 0)
        runs = outcome.runs.get(way)
        aim_oracle = AIM_EFFICIENCY.get(in_flight) if aimed else 1.0 if way == f"{HOT}, 256" else None
        at_256 = aimed and in_flight == max(IN_FLIGHT)
        padding = 100 * _median(outcome, way, "padding_ratio") if runs else None
        if way == ORACLE:
            padding = 100 * outcome.oracle_padding_ratio
        report.rows.append(
            (
                way,
                Figure(ratio(outcome, way, ORACLE), "x", at_least=aim_oracle),
                Figure(
                    ratio(outcome, way, SINGLE),
                    "x",
                    at_least=AIM_VS_SINGLE.get(trace.name) if at_256 else None,
                ),
                Figure(ratio(outcome, way, BY_LENGTH), "x"),
                Figure(
                    ratio(outcome, way, ARRIVAL_ORDER), "x", at_least=AIM_VS_ARRIVAL_ORDER if at_256 else None
                ),
                f"{_cpu_ratio(outcome, way):.2f}",
                "" if padding is None else f"{padding:.1f} %",
                f"{_median(outcome, way, 'mean_batch'):.1f}" if runs else "",
                f"{100 * _median(outcome, way, 'slots_busy'):.0f} %" if runs else "",
                Figure(statistics.median(rates) / mean_tokens, "/s"),
            )
        )
    return report


def latency(outcome: Outcome) -> Report:
    """A row per load and way; milliseconds from the time at which a request was meant to be sent."""
    report = Report(
        title=f"{outcome.trace.name}: Poisson arrivals, ms from the intended time of sending",
        columns=("load, way", "p50", "p95", "p99", "/ max_batch: 1", "/ in process"),
    )
    for load, way in sorted(outcome.latency_s):
        latency_s = outcome.latency_s[load, way]
        p99 = quantile_ms(latency_s, 99)
        aim = 1.0 if way == BEST else None
        report.rows.append(
            (
                f"{load:.0%}, {'in process' if way == SINGLE else way}",
                *(f"{quantile_ms(latency_s, q):.1f}" for q in QUANTILES),
                Figure(p99 / quantile_ms(outcome.latency_s[load, ALONE], 99), "x", at_most=aim),
                Figure(p99 / quantile_ms(outcome.latency_s[load, SINGLE], 99), "x", at_most=aim),
            )
        )
    return report
