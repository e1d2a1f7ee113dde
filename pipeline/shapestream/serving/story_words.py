"""The words of a story: a request's time in phases, as plain data, and sentences that say why it took so long. Pure.

`story_of` makes a dictionary from what the recorder knows of a request (stories.py). The admin port and clients get it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import itemgetter
from typing import Any

from shapestream.scheduling.events import CutReason
from shapestream.serving.stories import (
    ATTEMPTS,
    COMPANY,
    MINUTES,
    MOST_ANSWERED,
    MOST_ENDED,
    WAITS,
    Behind,
    Past,
    Phase,
    PhaseKind,
    may_see,
    microseconds,
    phases_of,
)
from shapestream.telemetry.runs import ClientId, Run


def nothing_of(text: str, reach_s: float) -> str:
    """Return the answer about a request of which nothing is remembered, or nothing that the asker may see."""
    return (
        f"nothing is known of request {text!r}, or another key sent it; stories are kept of the last {MOST_ANSWERED:,} "
        f"answered requests (at present {reach_s:.0f} s), of the last {MOST_ENDED:,} that failed or were of chains, and of "
        f"the slowest in each of the last {MINUTES} minutes"
    )


def story_of(past: Past, now: float, asker: ClientId | None) -> dict[str, Any]:
    """Return a story as plain data: numbers, `events` in ms since the arrival, and `why` it took so long."""
    if past.stages:
        return _story_of_chain(past, now)
    member, runs = past.member, past.runs
    arrived, last = member.arrived, runs[-1] if runs else None
    phases = phases_of(past, now)
    open_end = past.ended == inf
    runs_now = open_end and bool(phases) and phases[-1].kind is PhaseKind.RUNNING
    story: dict[str, Any] = {
        "request_id": member.id,
        **({} if member.caller is None else {"caller": member.caller}),
        **({} if member.trace is None else {"trace": member.trace}),
        **({} if past.part is None else {"stage": past.part.stage, "row": past.part.row}),
        "model": past.model,
        "sizes": list(member.sizes),
        "state": past.code or ("running" if runs_now else "queued" if open_end else "answered"),
        "arrived_s_ago": round(now - arrived, 3),
        "queued_before": past.ahead,
        "total_ms": _ms((now if open_end else past.ended) - arrived),
        "phases": _plain_phases(phases, arrived),
        "waited_behind": None if past.behind is None else _plain_behind(past.behind),
        "slot": None if last is None else last.slot,
        "attempts": len([run for run in runs if run.began < inf]),
        "code": past.code,
    }
    if last is not None:
        facts = last.facts
        mates = [mate for mate in last.members[: COMPANY + 1] if mate.number != member.number]
        story |= {
            "batch": last.batch,
            "batch_sizes": list(last.sizes),
            "batch_requests": len(last.requests),
            "with": [mate.id for mate in mates if may_see(asker, mate.client)],
            "cut": cut_reason(last),
            "padding_ratio": last.padding_ratio,
            "new_shape": facts.new_shape or last.preparations > 0,
            "predicted_ms": None if facts.predicted_s is None else _ms(facts.predicted_s),
        }
    story["events"] = [[_ms(time - arrived), text] for time, text in sorted(_events(past), key=itemgetter(0))]
    story["why"] = " ".join(_sentences(story, past, phases))
    return story


def _story_of_chain(past: Past, now: float) -> dict[str, Any]:
    """Return the story of a chain's request: its stages. Those of their requests that count stand below it."""
    member = past.member
    arrived, total_ms = member.arrived, _ms(min(past.ended, now) - member.arrived)
    open_state = "running" if any(each.began < inf for each in past.stages) else "waiting"
    stages = [
        {
            "stage": each.stage,
            "model": each.model,
            "began_ms": None if each.began == inf else _ms(each.began - arrived),
            "ended_ms": None if each.ended == inf else _ms(each.ended - arrived),
            "requests": each.requests,
            "unended": each.left,
            "failed": each.failed,
            "last": None if each.last is None else each.last.number,
            "last_failed": None if each.failure is None else each.failure.member.number,
        }
        for each in past.stages
    ]
    return {
        "request_id": member.id,
        **({} if member.caller is None else {"caller": member.caller}),
        **({} if member.trace is None else {"trace": member.trace}),
        "model": past.model,
        "sizes": list(member.sizes),
        "state": past.code or (open_state if past.ended == inf else "answered"),
        "arrived_s_ago": round(now - arrived, 3),
        "total_ms": total_ms,
        "stages": stages,
        "code": past.code,
        "events": [[0.0, "arrived"], *_events_of_stages(past)],
        "why": " ".join(_sentences_of_chain(past, now, total_ms)),
    }


def _events_of_stages(past: Past) -> list[list[Any]]:
    arrived = past.member.arrived
    events = []
    for each in past.stages:
        if each.began < inf:
            requests = _count(each.requests, "request")
            events.append(
                [_ms(each.began - arrived), f"stage {each.stage} began: {requests} for {each.model}"]
            )
        if each.ended < inf:
            events.append([_ms(each.ended - arrived), f"stage {each.stage} ended"])
    if past.code is not None:
        events.append([_ms(past.ended - arrived), f"failed: {past.code}: {past.message}"])
    return sorted(events, key=itemgetter(0))


def _sentences_of_chain(past: Past, now: float, total_ms: float) -> Iterator[str]:
    """Yield the stages in words, the longest first."""
    begun, until = [each for each in past.stages if each.began < inf], min(past.ended, now)
    waited_ms = _ms(min([each.began for each in begun], default=until) - past.member.arrived)
    parts = [(waited_ms, f"waited {waited_ms:g} ms for room for its stages")] if waited_ms else []
    for each in begun:
        ms = _ms(min(each.ended, until) - each.began)
        failed = f", {each.failed} of them failed" if each.failed else ""
        left = f", {each.left} without an answer yet" if each.left and past.ended == inf else ""
        requests = f"{_count(each.requests, 'request')}{failed}{left}"
        spent = "has spent" if each.ended == inf and past.ended == inf else "spent"
        parts.append((ms, f"{spent} {ms:g} ms in stage {each.stage} ({requests})"))
    parts.sort(key=itemgetter(0), reverse=True)
    yield f"Of {total_ms:g} ms it " + "; it ".join([text for _, text in parts]) + "."
    left_out = [each.stage for each in past.stages if each.began == inf]
    if left_out:
        yield f"Not begun: {', '.join(left_out)}."
    if past.ended == inf:
        yield "It still runs." if begun else "It still waits."
    if past.code is not None:
        yield f"It ended without a result: {past.code}: {past.message}."


def _plain_phases(phases: Sequence[Phase], arrived: float) -> list[dict[str, Any]]:
    """Return the phases as plain data, rounded at their borders, so that they add up to the whole."""
    borders = [microseconds(phase.ends - arrived) for phase in phases]
    return [
        {
            "phase": phase.kind.value,
            "ms": (ends - begins) / 1000,
            "batch": None if phase.run is None else phase.run.batch,
            "slot": None if phase.run is None else phase.run.slot,
        }
        for phase, begins, ends in zip(phases, [0, *borders], borders, strict=False)
    ]


def _plain_behind(behind: Behind) -> dict[str, Any]:
    longest = sorted(behind.models.items(), key=lambda one: -(one[1][1] + one[1][2]))
    return {
        "slots": list(behind.slots[:COMPANY]),
        "batches": sum([batches for batches, _, _ in behind.models.values()]),
        "own_ms": _ms(sum([own_s for _, own_s, _ in behind.models.values()])),
        "others_ms": _ms(sum([others_s for _, _, others_s in behind.models.values()])),
        "models": {
            model: {"batches": batches, "own_ms": _ms(own_s), "others_ms": _ms(others_s)}
            for model, (batches, own_s, others_s) in longest[:COMPANY]
        },
        "complete": behind.complete,
    }


def cut_reason(run: Run) -> str:
    """Return the reason why a batch holds no more requests."""
    facts = run.facts
    if facts.reason in (CutReason.COST, CutReason.DIVIDED):
        if not facts.left:
            return "nothing else was queued"
        if run.sizes and run.sizes[0] >= facts.max_batch:
            return "the batch is full"
    return facts.reason.value


def _events(past: Past) -> Iterator[tuple[float, str]]:
    before = (
        "" if past.ahead is None else f"; queued before it for {past.model}: {_count(past.ahead, 'request')}"
    )
    yield past.member.arrived, f"arrived{before}"
    yield from past.troubles
    for run in past.runs:
        behind = "" if run.behind is None else f", queued behind batch {run.behind}"
        company = (
            f"batch {run.batch}: {_count(len(run.requests), 'request')} at {list(run.sizes)} for {run.slot}"
        )
        yield run.sent, f"{company}{behind}; {cut_reason(run)}"
        if run.sent < run.began < inf:
            yield run.began, f"batch {run.batch} began"
        if past.ended < run.ended < inf:
            yield run.ended, f"batch {run.batch} ended without it"
        elif run.ended < inf and run.code is not None:
            yield run.ended, f"batch {run.batch} failed: {run.code}"
        elif run.ended < inf and past.code is None:
            yield run.ended, f"answered; its calls took {_ms(run.run_us * 1e-6)} ms"
    if past.code is not None:
        yield past.ended, f"failed: {past.code}: {past.message}"


def _sentences(story: dict[str, Any], past: Past, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield sentences that say where the time went, the longest part first, and what else is worth knowing."""
    parts = [(ms, text) for ms, text in _parts(story, past, phases) if ms or not story["total_ms"]]
    parts.sort(key=itemgetter(0), reverse=True)
    yield f"Of {story['total_ms']:g} ms it " + "; it ".join([text for _, text in parts]) + "."
    if past.behind is not None and any(kind in WAITS for kind, *_ in phases):
        yield _meanwhile(story["waited_behind"], len(past.behind.slots), past.model)
    if past.code is not None and phases and phases[-1].kind is PhaseKind.RUNNING:
        ended = past.runs[-1].ended
        if ended == inf:
            yield "Its call runs on without it."
        elif ended > past.ended:
            yield f"Its call ran on without it for {_ms(ended - past.ended):g} ms."
    if story.get("padding_ratio"):
        yield f"{story['padding_ratio']:.0%} of what its batch computed was padding."
    if story.get("new_shape"):
        yield f"The shape {story['batch_sizes']} was new."
    if past.code is not None:
        yield f"It ended without a result: {past.code}."
    elif story["state"] in ("queued", "running"):
        yield f"It is still {story['state']}."


def _parts(story: dict[str, Any], past: Past, phases: Sequence[Phase]) -> Iterator[tuple[float, str]]:
    """Yield the phases in words, with their milliseconds; phases of one kind are one part."""
    plain = list(zip(phases, story["phases"], strict=True))

    def ms_of(*kinds: PhaseKind, among: Sequence[tuple[Phase, dict[str, Any]]] = plain) -> float:
        ms: float = sum([part["ms"] for phase, part in among if phase.kind in kinds])
        return round(ms, 3)

    begun = next((at for at, (phase, _) in enumerate(plain) if phase.kind in ATTEMPTS), len(plain))
    at_slot = [phase.run.behind for phase in phases if phase.run and phase.kind is PhaseKind.BEHIND]
    behind = (
        f", {ms_of(PhaseKind.BEHIND):g} ms of it at the slot behind batch {at_slot[-1]}" if at_slot else ""
    )
    queue = "" if not past.ahead else f", behind {_count(past.ahead, 'queued request')}"
    first_ms = ms_of(*WAITS, among=plain[:begun])
    company_ms = min(first_ms, _ms(past.runs[0].facts.company_s)) if past.runs else 0.0
    company = (
        f", {company_ms:g} ms of it while the slot was free and waited for company" if company_ms else ""
    )
    yield first_ms, f"waited {first_ms:g} ms for a slot{queue}{behind}{company}"
    again_ms = ms_of(*WAITS, among=plain[begun:])
    yield again_ms, f"waited {again_ms:g} ms to run again"
    failed = [phase.run for phase in phases if phase.run and phase.kind is PhaseKind.FAILED]
    if failed:
        codes = ", ".join([f"batch {run.batch} on {run.slot}: {run.code}" for run in failed])
        attempts = "a failed attempt" if len(failed) == 1 else f"{len(failed)} failed attempts"
        yield ms_of(PhaseKind.FAILED), f"spent {ms_of(PhaseKind.FAILED):g} ms in {attempts} ({codes})"
    if phases and phases[-1].kind is PhaseKind.RUNNING:
        ran = "has run" if past.code is None else "ran"
        yield (
            ms_of(PhaseKind.RUNNING),
            f"{ran} {ms_of(PhaseKind.RUNNING):g} ms in batch {story['batch']} on {story['slot']}",
        )
    if any(phase.kind is PhaseKind.CALLS for phase in phases):
        held_ms = ms_of(PhaseKind.CALLS, PhaseKind.COPIES)
        predicted = "" if story["predicted_ms"] is None else f", predicted {story['predicted_ms']:g} ms"
        company = f"in a batch of {story['batch_requests']} on {story['slot']}"
        yield held_ms, f"ran {held_ms:g} ms {company} (calls {ms_of(PhaseKind.CALLS):g} ms{predicted})"
        yield ms_of(PhaseKind.WAY), f"spent {ms_of(PhaseKind.WAY):g} ms on the way to the slot and back"


def _meanwhile(behind: dict[str, Any], slots: int, model: str) -> str:
    """Return a sentence about what ran on the slots of a request's model while it waited."""
    if not slots:
        return f"No slot served {model}."
    where = behind["slots"][0] if slots == 1 else f"its {slots} slots"
    if not behind["batches"]:
        return f"Meanwhile no batch that is remembered ran on {where}."
    whose = [(behind["others_ms"], "other clients"), (behind["own_ms"], "its own client")]
    shares = ", ".join([f"{ms:g} ms for {client}" for ms, client in whose if ms])
    models = [
        f"{part['own_ms'] + part['others_ms']:g} ms for {name}" for name, part in behind["models"].items()
    ]
    which = f"all for {next(iter(behind['models']))}" if len(models) == 1 else ", ".join(models)
    least = "" if behind["complete"] else "at least "
    return f"Meanwhile {where} ran {least}{_count(behind['batches'], 'batch', 'batches')}: {shares}; {which}."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _ms(seconds: float) -> float:
    return microseconds(seconds) / 1000
