"""Run a benchmark: open every variant, warm up, and go round by round from one to the next."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from expert_driver.bench import dispatches
from expert_driver.bench.conditions import conditions, load
from expert_driver.bench.report import Report
from expert_driver.bench.samples import Samples
from expert_driver.bench.settings import WARM_UP, Settings
from expert_driver.bench.subject import Subject
from expert_driver.bench.weights import Weights, bytes_per_token, per_token
from expert_driver.config import NetworkConfig
from expert_driver.opening import Session, opened
from expert_driver.trace import Tracer, watching
from expert_network import kernels
from expert_network.backend import detect
from expert_network.progress import Progress


def run(
    store: str | None,
    variants: Mapping[str, NetworkConfig],
    settings: Settings,
    progress: Progress,
    tracer: Tracer | None = None,
) -> Report:
    """Measure each of `variants` and report. Raises what opening a model and using it raise."""
    with ExitStack() as stack:
        subjects = [
            Subject(name, stack.enter_context(opened(store, config, with_text=False)), config)
            for name, config in variants.items()
        ]
        if tracer is not None:
            for session in (subject.session for subject in subjects):
                stack.enter_context(watching(session.engine, session.network, tracer))
        first = subjects[0].session
        before = conditions()
        weights = _weights(first, next(iter(variants.values())), settings)
        samples = _Rounds(subjects, weights, settings, progress).run()
        found = before | {"load_after": load()}
        return Report(_subject(first), found, settings, tuple(variants), samples.series)


def _weights(session: Session, config: NetworkConfig, settings: Settings) -> Weights | None:
    """The kernels are measured where this process has blocks: not over nodes."""
    if config.nodes or "kernels" not in settings.parts:
        return None
    return Weights(session.store, detect(config.computing.kernels, config.computing.threads))


def _subject(session: Session) -> dict[str, object]:
    """What is measured, as JSON."""
    manifest, network = session.store.manifest, session.network
    names = [] if network is None else [link.name for link in network.links]
    where = f"over {len(names)} nodes" if names else "in this process"
    return {
        "name": session.store.path.name,
        "digest": manifest.digest,
        "model_type": manifest.model_type,
        "layers": len(manifest.layers),
        "experts": max(layer.experts for layer in manifest.layers),
        "per_token": per_token(session.store.config),
        "weights_per_token_bytes": bytes_per_token(session.store),
        "nodes": names,
        "where": where,
        "computing": session.computing,
        "threads": kernels.threads() if session.computing.startswith("native") else None,
    }


class _Rounds:
    """All measurements of all subjects, one sample of each in every round."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        weights: Weights | None,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self._subjects, self._settings, self._progress = subjects, settings, progress
        self._weights = weights
        self._samples, self._done = Samples(), 0
        # Tokens stand for time: reading and decoding one take about as long.
        decoded = len(settings.contexts) if "decode" in settings.parts else 0
        each = sum(settings.lengths) + settings.tokens * decoded
        self._total = (each * settings.rounds + sum(WARM_UP)) * len(subjects)

    def run(self) -> Samples:
        weights = self._weights
        for subject in self._subjects:
            self._warm_up(subject)
        for number in range(self._settings.rounds):
            # Whoever comes second finds other caches and clocks: so they take turns.
            turn = self._subjects if number % 2 == 0 else self._subjects[::-1]
            for length in self._settings.lengths:
                for subject in turn:
                    self._read_and_decode(subject, length, number)
            for subject in turn:
                self._dispatch(subject, number)
            if weights is not None:
                weights.measure(self._samples, number)
        self._progress(self._total, self._total, "measuring")
        return self._samples

    def _warm_up(self, subject: Subject) -> None:
        reading, decoding = WARM_UP
        subject.prefill(reading, -1)
        subject.decode(decoding, -1)
        subject.forget()
        self._advance(sum(WARM_UP))

    def _read_and_decode(self, subject: Subject, length: int, number: int) -> None:
        settings, name = self._settings, subject.variant
        gc.collect()
        seconds = subject.prefill(length, number)
        self._advance(length)
        if "prefill" in settings.parts and length in settings.prompts:
            self._samples.add("prefill", f"{length} tokens", "tok/s", name, length / seconds)
        if "decode" in settings.parts and length in settings.contexts:
            self._decode(subject, length, number)
        subject.forget()

    def _decode(self, subject: Subject, length: int, number: int) -> None:
        tokens, name = self._settings.tokens, subject.variant
        before = subject.traffic
        seconds = subject.decode(tokens, number)
        self._samples.add("decode", f"{length} tokens", "tok/s", name, tokens / seconds)
        if crossed := subject.traffic - before:
            self._samples.add("traffic", "a token", "KB", name, crossed / tokens / 1e3)
        self._advance(tokens)

    def _dispatch(self, subject: Subject, number: int) -> None:
        network, name = subject.session.network, subject.variant
        if network is None or "dispatch" not in self._settings.parts:
            return
        manifest, count = subject.session.store.manifest, self._settings.dispatches
        found = dispatches.single_rows(network, manifest, subject.precise, count, number)
        add = self._samples.add
        add("dispatch", "1 row", "us", name, *map(dispatches.total_us, found))
        add("of it computing", "1 row", "us", name, *map(dispatches.computing_us, found))
        add("of it overhead", "1 row", "us", name, *map(dispatches.overhead_us, found))
        add("ping", "a node", "us", name, *dispatches.ping_us(network, count))

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        self._progress(min(self._done, self._total - 1), self._total, "measuring")
