"""Findings from what was seen of one engine. Pure: reads a Worker that is no longer changing, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.config.schema import LOOPBACK_HOSTS
from router.doctor.findings import Diagnosis, Finding, Severity
from router.doctor.wiretap import Heard
from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.pairs.pools import by_role, missing_text

EVENTS_FLAG = '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
BIND_ADVICE = (
    'the publisher may connect instead of bind (endpoint must be tcp://*:PORT, or carry "bind":true), or its prefix '
    "cache is off (--disable-radix-cache)"
)


@dataclass(slots=True)
class Evidence:
    """Beside the worker itself. `probed` is false without --probe: silence proves nothing then."""

    heard: Mapping[int, Heard] = field(default_factory=dict)
    """By rank: what the wiretap took."""
    probed: bool = False
    tokenizer_problem: str = ""
    """Why text prompts are not tokenised here; empty when they are."""
    probe_findings: tuple[Finding, ...] = ()
    split: Sequence[Finding] = ()
    """Of `split_findings`."""


def diagnose(worker: Worker, evidence: Evidence) -> Diagnosis:
    """Everything that can be said of one engine, the gravest first."""
    if worker.info is None:
        return Diagnosis(worker.url.text, False, (_not_described(worker),), "not checked")
    findings = [*_engine(worker, evidence), *evidence.probe_findings, *evidence.split]
    for rank in worker.ranks:
        findings.extend(_rank(worker, rank, evidence))
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    return Diagnosis(worker.url.text, True, tuple(findings), _summary(worker))


def split_findings(workers: Sequence[Worker]) -> dict[str, list[Finding]]:
    """By URL: what shows only when the engines of a split fleet are looked at together."""
    found: dict[str, list[Finding]] = {}
    for name in sorted({name for worker in workers for name in worker.models}):
        pools = by_role(worker for worker in workers if worker.info is not None and worker.serves(name))
        elsewhere = any(worker.url.host not in LOOPBACK_HOSTS for worker in pools.decode)
        for worker in pools.prefill:
            if worker.url.host in LOOPBACK_HOSTS and worker.bootstrap_port is not None and elsewhere:
                what = f"decode engines on other machines are told to meet it at {worker.url.host}"
                advice = "give the router this engine's URL with an address that decode engines can reach"
                found.setdefault(worker.url.text, []).append(Finding("error", "bootstrap_host", what, advice))
        code = pools.missing()
        if code is None:
            continue
        severity: Severity = "error" if len(workers) > 1 else "warning"
        advice = f"start the other half, or check it as well: requests get 503 {code} without it"
        for worker in (*pools.prefill, *pools.decode):
            half = Finding(severity, "half_pool", missing_text(code, name), advice)
            found.setdefault(worker.url.text, []).append(half)
    return found


def _not_described(worker: Worker) -> Finding:
    why = worker.health.why if worker.health.down else worker.info_problem
    if "401" in why or "403" in why:
        return Finding("error", "key", why, "set workers[].api_key or worker_api_key (doctor: --config FILE)")
    advice = "is the engine started, is the URL its HTTP address, does a firewall stand between?"
    return Finding("error", "unreachable", why, advice)


def _engine(worker: Worker, evidence: Evidence) -> Iterator[Finding]:
    info, descriptor = worker.info, worker.descriptor
    assert info is not None
    if worker.state != "ready":
        yield Finding(
            "error", "health", f"{worker.state}: {worker.reason}", "wait for /health, or see the engine's log"
        )
    if worker.role != "plain":
        yield Finding("info", "role", f"a {worker.role} engine", "it gets no plain traffic from the router, only pairs")
    for drift in worker.drifts.values():
        what = f"advertised {drift.advertised}, observed {drift.observed}"
        yield Finding("error", f"drift_{drift.kind}", what, drift.advice)
    if info.engine == "vllm":  # it describes no flags, and a false "not reported" would send people looking
        yield Finding(
            "info",
            "cache_report",
            "vLLM does not say whether usage carries cached tokens",
            "it does with --enable-prompt-tokens-details",
        )
    elif not info.cache_report:
        what, advice = "cached tokens are not reported in usage", "start the engine with --enable-cache-report"
        yield Finding("warning", "cache_report", what, advice)
    if descriptor is None and worker.role == "decode":
        advice = f"nothing to do, unless it keeps a radix cache: then start it with {EVENTS_FLAG}"
        yield Finding("info", "no_descriptor", "a decode engine that announces no blocks", advice)
        return
    if descriptor is None:
        advice = f"start SGLang with {EVENTS_FLAG}; for vLLM set workers[].kv_events in the router's configuration"
        yield Finding("error", "no_descriptor", worker.ranks[0].reason if worker.ranks else "no ranks", advice)
        return
    for note in descriptor.notes:
        yield Finding("warning", "descriptor", note, "correct the engine's --kv-events-config, or workers[].kv_events")
    if all(at.replay is None for at in descriptor.ranks):
        yield Finding(
            "warning",
            "no_replay",
            "no replay socket: a lost batch or a router restart costs the rank what it held",
            'add "replay_endpoint":"tcp://*:PORT" to --kv-events-config',
        )
    if info.engine == "sglang" and all(at.load is None for at in descriptor.ranks):
        yield Finding(
            "warning",
            "no_load_reports",
            "the engine announces no load: other routers' requests and its prefill speed are unknown",
            "start SGLang with --load-publish-endpoint auto",
        )
    if evidence.tokenizer_problem:
        yield Finding(
            "info",
            "tokenizer",
            f"text prompts are tokenised by the engine: {evidence.tokenizer_problem}",
            "set tokenizer.path to a copy of the model's tokenizer folder to save that round trip",
        )


def _rank(worker: Worker, rank: Rank, evidence: Evidence) -> Iterator[Finding]:
    name = f"rank {rank.number}"
    if worker.descriptor is None:
        return
    if rank.state == "off":
        yield Finding("error", "rank_off", f"{name}: {rank.reason}", "correct ports or dp_size in --kv-events-config")
        return
    heard = evidence.heard.get(rank.number, Heard())
    yield from _topics(worker, name, heard)
    if rank.state in ("unreachable", "connecting"):
        advice = "is the port open from here (base + rank)? Ranks on other nodes: workers[].kv_events.endpoints"
        yield Finding("error", "rank_unreachable", f"{name}: {rank.reason}", advice)
    elif rank.state == "duplicated":
        advice = "one publishing process a rank: upgrade SGLang past the context-parallel publisher fix"
        yield Finding("error", "duplicate_publishers", f"{name}: {rank.reason}", advice)
    elif rank.state in ("silent", "drifted", "gapped"):
        yield Finding("error", f"rank_{rank.state}", f"{name}: {rank.reason}", BIND_ADVICE)
    elif rank.last_seq is None and not heard.topics:
        if evidence.probed:
            yield Finding("error", "rank_silent", f"{name}: prompts were served and no event came", BIND_ADVICE)
        else:
            yield Finding("info", "nothing_heard", f"{name}: no event while listening", "send traffic, or use --probe")
    if rank.history == "partial" and rank.state == "live":
        yield Finding(
            "info",
            "history_partial",
            f"{name}: replay does not reach back to the engine's start; credit grows as conversations go on",
            "a larger buffer_steps in --kv-events-config, if routers restart often",
        )
    unusable = {kind: count for kind, count in rank.rejects.items() if kind in ("frames", "payload", "error", "seq")}
    if unusable:
        counted = ", ".join(f"{count} {kind}" for kind, count in unusable.items())
        yield Finding("error", "unusable_messages", f"{name}: {counted}", "is something else publishing on this port?")
    at = next((at for at in worker.descriptor.ranks if at.rank == rank.number), None)
    if at is not None and at.replay is not None and ("timeout" in rank.replays or rank.state == "replaying"):
        advice = "is the replay port (replay_endpoint + rank) open from here?"
        yield Finding("warning", "replay_silent", f"{name}: {at.replay} does not answer", advice)
    if at is not None and at.load is not None and rank.load_report is None:
        advice = "is the load port open from here? SGLang sends one report a second"
        yield Finding("warning", "load_silent", f"{name}: no load report from {at.load}", advice)


def _topics(worker: Worker, name: str, heard: Heard) -> Iterator[Finding]:
    assert worker.descriptor is not None
    wanted = worker.descriptor.topic
    others = sorted(topic for topic in heard.topics if topic != wanted)
    if others and not heard.topics[wanted]:
        yield Finding(
            "error",
            "topic",
            f"{name}: the engine publishes under {', '.join(map(repr, others))}, the descriptor says {wanted!r}",
            f'make "topic" of --kv-events-config and workers[].kv_events.topic agree, e.g. topic: {others[0]!r}',
        )


def _summary(worker: Worker) -> str:
    info, scheme = worker.info, worker.scheme
    assert info is not None
    parts = [f"{info.engine} {info.version or ''}".strip(), ", ".join(worker.models[:3]) or "no model name"]
    if scheme is not None:
        proven = "recomputed and equal" if scheme.proven and scheme.scheme.kind == "sglang-sha256" else "own chain"
        if not scheme.proven:
            proven = "not yet seen on the wire"
        parts.append(f"blocks of {scheme.scheme.width} tokens, hash {scheme.scheme.kind} ({proven})")
    blocks = sum(sum(rank.blocks().values()) for rank in worker.ranks)
    live = sum(rank.state == "live" for rank in worker.ranks)
    parts.append(f"{live} of {len(worker.ranks)} ranks live, {blocks} blocks")
    return "; ".join(parts)
