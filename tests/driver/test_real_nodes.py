"""The driver against real node processes: the same words, and every way to lose a node."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

from expert_driver.cli import main
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.conversation import Conversation
from expert_driver.opening import Session, opened
from expert_driver.trace import tracing, watching
from expert_network.errors import ExpertNetworkError, NodeError
from expert_network.store.reader import Store
from expert_roster.rendezvous import partition
from expert_roster.roster import Roster
from tests.driver.programs import COMMAND, DEMO_STORE, environment, expert_net
from tests.driver.test_trace import check_nesting, read, tracks
from tests.support.nodes import NodeProcess, node_process, node_processes

PROMPT = "Tell me a story about a bored octopus."
HOME = Path("/nowhere")
SHORT = Sampling(max_tokens=24)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeProcess]]:
    """Two nodes that no test harms."""
    with node_processes("a,b", DEMO_STORE) as nodes:
        yield nodes


def joined(nodes: list[NodeProcess]) -> str:
    return ",".join(node.url for node in nodes)


@contextmanager
def session_with(
    nodes: list[NodeProcess], exact: bool = True, store: Path = DEMO_STORE
) -> Iterator[Session]:
    config = NetworkConfig(tuple(node.url for node in nodes), exact, None, None, HOME)
    with opened(str(store), config, with_text=True) as session:
        yield session


def conversation(session: Session, sampling: Sampling = SHORT) -> Conversation:
    assert session.text is not None
    return Conversation(session.engine, session.text, sampling)


@pytest.fixture(scope="module")
def expected() -> str:
    """What one process says to PROMPT in SHORT, in exact mode."""
    config = NetworkConfig((), True, None, None, HOME)
    with opened(str(DEMO_STORE), config, with_text=True) as session:
        return "".join(conversation(session).ask(PROMPT))


# The same words


@pytest.mark.parametrize("reverse", [False, True])
def test_exact_says_what_one_process_says(
    nodes: list[NodeProcess], expected: str, reverse: bool
) -> None:
    """In exact mode two nodes, in any order, give the greedy tokens of one process."""
    with session_with(nodes[::-1] if reverse else nodes) as session:
        assert "".join(conversation(session).ask(PROMPT)) == expected


def test_exact_gives_the_bits_of_one_process(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """In exact mode the logits over nodes are those of a plain one-process run, bit for bit."""
    ids = ("--ids", ",".join(str(7 * n) for n in range(70)))
    for name, over in (("one", ("--exact",)), ("two", ("--nodes", joined(nodes), "--exact"))):
        out = str(tmp_path / f"{name}.npy")
        assert main(["logits", str(DEMO_STORE), *ids, *over, "-o", out]) == 0
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()


def test_the_order_of_nodes_changes_no_bit(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """Sum mode gives the same logits for every order of --nodes."""
    found = set()
    for order in (nodes, nodes[::-1]):
        out = tmp_path / f"{order[0].port}.npy"
        arguments = ("--ids", "1,20,300", "-o", str(out), "--nodes", joined(order))
        assert main(["logits", str(DEMO_STORE), *arguments]) == 0
        found.add(out.read_bytes())
    assert len(found) == 1


def test_a_prompt_over_nodes_with_figures(nodes: list[NodeProcess], expected: str) -> None:
    """-p answers on stdout alone, from a pipe too; -v says how on stderr."""
    arguments = (DEMO_STORE, "--nodes", joined(nodes), "--exact", "--max-tokens", "24")
    done = expert_net(*arguments, "-v", "-p", "-", stdin=PROMPT)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
    assert "exact replies, f32 on the wire" in done.stderr
    assert "first token after" in done.stderr and "computing" in done.stderr
    assert "attention  packing" in done.stderr
    piped = expert_net(*arguments, stdin=PROMPT)
    assert piped.stdout == done.stdout


# Where the time goes


def test_the_time_of_a_token_adds_up(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """The parts of a token are all of its time; a trace shows each layer on driver and nodes."""
    file = tmp_path / "trace.json"
    with session_with(nodes, exact=False) as session, tracing(file) as out:
        talk = conversation(session, Sampling(max_tokens=8))
        with watching(session.engine, session.network, out) as watch:
            "".join(talk.ask(PROMPT))
    assert talk.last is not None and watch.tokens == talk.last.timing.tokens - 1 == 7
    found = tracks(read(file))
    for events in found.values():
        check_nesting(events)
    names = [event["name"] for event in found["driver"]]
    assert (names.count("prompt"), names.count("token")) == (1, 7)
    shown = sum(event["dur"] for event in found["driver"] if event["name"] == "token") / 1e6
    # The trace counts whole microseconds.
    assert watch.parts.total == pytest.approx(shown, abs=7 * 2e-6)
    assert watch.parts.total <= talk.last.timing.decode_s
    for node in ("a", "b"):
        # While the prompt is read, two dispatches may be under way.
        mine = [e for track in found for e in found[track] if track.startswith(f"node {node}")]
        assert {e["name"] for e in mine if "out" in e["args"]} == {f"layer {n}" for n in range(8)}


def test_a_trace_after_an_interrupt(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """Ctrl-C in a reply leaves a trace of what there was."""
    file = tmp_path / "trace.json"
    options = ("--max-tokens", "400", "--ignore-eos", "-p", PROMPT, "--trace", str(file))
    command = [*COMMAND, str(DEMO_STORE), "--nodes", joined(nodes), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert "prompt" in [event["name"] for event in tracks(read(file))["driver"]]


# Losing a node


def cut(talk: Conversation, node: NodeProcess, how: str) -> tuple[str, float]:
    """The reply in which `how` is done to `node`, and the longest wait for a token after that."""
    pieces, longest, last = [], 0.0, None
    for count, piece in enumerate(talk.ask(PROMPT)):
        if last is not None:
            longest, last = max(longest, monotonic() - last), monotonic()
        if count == 3:
            getattr(node, how)()
            last = monotonic()
        pieces.append(piece)
    return "".join(pieces), longest


def test_a_reply_outlives_a_node(expected: str) -> None:
    """A node that dies in a reply is not in its words; once it is back it is used again.

    tests/scenarios has all the other ways to lose one.
    """
    with node_processes("a,b,c", DEMO_STORE, "--replicas", "2") as nodes:
        second = nodes[1]
        with session_with(nodes) as session:
            talk = conversation(session)
            said, longest = cut(talk, second, "kill")
            assert said == expected and longest < 1.0
            assert session.network is not None and session.network.figures.failovers
            talk.reset()
            assert "".join(talk.ask(PROMPT)) == expected
            assert [link.name for link in session.network.links] == ["a", "c"]
            same = ("--replicas", "2", "--port", str(second.port))
            with node_process("a,b,c", "b", DEMO_STORE, *same):
                deadline = monotonic() + 30
                while len(session.network.links) < 3 and monotonic() < deadline:
                    talk.reset()
                    assert "".join(talk.ask(PROMPT)) == expected
                assert len(session.network.links) == 3


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    """The demo's store without the blocks that b owns in the roster a,b."""
    made = tmp_path / "lacking"
    shutil.copytree(DEMO_STORE, made)
    store = Store.open(DEMO_STORE)
    for layer, experts in partition(Roster.parse("a,b"), "b", store.manifest.shape).items():
        spec = store.manifest.layer(layer)
        with (made / spec.file).open("r+b") as file:
            for expert in experts.tolist():
                file.seek(spec.offset(expert))
                file.write(bytes(spec.block_bytes))
    return made


def test_a_block_that_the_driver_alone_has(expected: str, lacking: Path) -> None:
    """What no living node has comes from the driver's own store, and the reply goes on."""
    with (
        node_process("a,b", "a", lacking) as first,
        node_process("a,b", "b", DEMO_STORE) as second,
        session_with([first, second]) as session,
    ):
        said, _ = cut(conversation(session), second, "kill")
        assert said == expected
        assert first.get("/status")["partition"]["blocks"] > 8


def test_a_block_that_is_nowhere(expected: str, lacking: Path) -> None:
    """Where no living machine has a block the reply fails within a second, and names both.

    Once its node is back the talk goes on.
    """
    with (
        node_process("a,b", "a", lacking) as first,
        node_process("a,b", "b", DEMO_STORE) as second,
        session_with([first, second], store=lacking) as session,
    ):
        talk = conversation(session)
        started = 0.0
        with pytest.raises(NodeError, match=r"node b .* no other node has its block") as caught:
            for count, _ in enumerate(talk.ask(PROMPT)):
                if count == 3:
                    started = monotonic()
                    second.kill()
        assert caught.value.node == "b" and monotonic() - started < 1.0
        with pytest.raises(ExpertNetworkError):
            "".join(talk.ask(PROMPT))
        with node_process("a,b", "b", DEMO_STORE, "--port", str(second.port)):
            assert "".join(talk.ask(PROMPT)) == expected


def test_a_drained_node_says_goodbye(expected: str) -> None:
    """A node that is stopped politely between two replies is linked again when it is back."""
    with node_processes("a,b", DEMO_STORE) as nodes, session_with(nodes) as session:
        second = nodes[1]
        talk = conversation(session)
        assert "".join(talk.ask(PROMPT)) == expected
        assert second.stop() == 0
        with node_process("a,b", "b", DEMO_STORE, "--port", str(second.port)):
            talk.reset()
            assert "".join(talk.ask(PROMPT)) == expected
