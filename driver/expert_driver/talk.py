"""A conversation on the command line: what `expert-net STORE` does once its options are read."""

from __future__ import annotations

import sys
from pathlib import Path

from expert_driver import figures, times
from expert_driver.chat import Chat, reader_for, stream
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.conversation import Conversation
from expert_driver.opening import Session, opened
from expert_driver.times import Watch
from expert_driver.trace import Tracer, tracing, watching
from expert_network.memory import peak_rss


def run(
    store: str | None,
    config: NetworkConfig,
    sampling: Sampling,
    question: str | None,
    system: str | None,
    verbose: bool,
    trace: Path | None,
) -> None:
    """Reply to `question`, or chat if there is none."""
    with tracing(trace) as tracer, opened(store, config, with_text=True) as session:
        talk(session, sampling, question, system, verbose, question is None, tracer)


def talk(
    session: Session,
    sampling: Sampling,
    question: str | None,
    system: str | None,
    verbose: bool,
    chat: bool,
    trace: Tracer | None = None,
) -> None:
    """Reply to `question` if there is one, then chat if `chat`, over a session that is open."""
    if not verbose and trace is None:
        _talk(session, sampling, question, system, chat, None)
        return
    with watching(session.engine, session.network, trace) as watch:
        _talk(session, sampling, question, system, chat, watch if verbose else None)


def _talk(
    session: Session,
    sampling: Sampling,
    question: str | None,
    system: str | None,
    chat: bool,
    watch: Watch | None,
) -> None:
    assert session.text is not None
    conversation = Conversation(session.engine, session.text, sampling, system, session.longest)

    def after(conversation: Conversation) -> None:
        if watch is not None:
            show_figures(session, conversation, watch)

    if question is not None:
        stream(conversation, question, sys.stdout, sys.stderr)
        after(conversation)
    if not chat:
        return
    if not session.text.has_template:
        print("This model has no chat template: it continues what you write.", file=sys.stderr)
    if sys.stdin.isatty():
        print(f"{greeting(session)} /help lists what else you can type.", file=sys.stderr)
    Chat(conversation, reader_for(sys.stdin), sys.stdout, sys.stderr, after).run()


def greeting(session: Session) -> str:
    """Which model, and where its experts are."""
    where = "with all experts in this process"
    if session.network is not None:
        names = [link.name for link in session.network.links]
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        where = f"with its experts on {listed}"
    return f"{session.store.path.name} ({session.store.manifest.model_type}) {where}."


def show_figures(session: Session, conversation: Conversation, watch: Watch) -> None:
    """Print the figures of the last reply on stderr, and count the next one's from zero."""
    assert conversation.last is not None
    timing, computing = conversation.last.timing, session.computing
    where = times.lines(watch, session.network is not None)
    for line in figures.lines(timing, session.figures, peak_rss(), session.mode, computing, where):
        print(line, file=sys.stderr)
    sys.stderr.flush()
    if session.figures is not None:
        session.figures.reset()
