"""The chat and the demo as a person meets them: at a terminal, with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.driver.programs import COMMAND, DEMO_STORE, environment, expert_net
from tests.driver.terminal import Terminal, at_terminal
from tests.support.nodes import NodeProcess, node_command, node_process

QUESTION = "Tell me a short story about Mia and the silver whistle."
ASKED = r"(?m)^>"  # what the line editor writes when it waits for a line
ENDLESS = ("--max-tokens", "100000", "--ignore-eos")


def chat(*arguments: str | Path) -> list[str]:
    """A command whose replies have the same words with all kernels."""
    precise = () if "--exact" in arguments else ("--precision", "f32")
    return [*COMMAND, str(DEMO_STORE), *precise, *map(str, arguments)]


def test_a_chat_in_one_process(tmp_path: Path) -> None:
    """At a terminal a chat starts by itself: it answers, obeys, and leaves on Ctrl-D."""
    with at_terminal(chat("--max-tokens", "12"), environment()) as person:
        person.expect(ASKED)
        person.type("/help\r")
        person.expect("/reset  forget")
        person.expect(ASKED)
        person.type(f"{QUESTION}\r")
        person.expect("Mia loved to")
        person.expect(r"\[cut at 12 tokens")
        person.expect(ASKED)
        person.type("\x04")
        assert person.wait() == 0


def test_ctrl_c_stops_a_reply_and_keeps_the_chat() -> None:
    """Ctrl-C in a reply stops it; the next question is answered; Ctrl-C twice leaves."""
    with at_terminal(chat(*ENDLESS), environment()) as person:
        person.expect(ASKED)
        person.type(f"{QUESTION}\r")
        person.expect("Mia loved to")
        person.interrupt()
        person.expect("stopped")
        person.expect(ASKED)
        person.type("Tell me a story about a duck.\r")
        person.expect("Once upon a")
        person.interrupt()
        person.expect("stopped")
        person.expect(ASKED)
        person.type("\x03")
        person.expect("Ctrl-C again")
        person.expect(ASKED)
        person.type("\x03")
        assert person.wait() == 0


def test_a_chat_outlives_its_node() -> None:
    """A node that dies in a reply is one sentence; the chat goes on when it is back."""
    with node_process("a", "a", DEMO_STORE) as node:
        command = chat("--nodes", node.url, "--exact", *ENDLESS)
        with at_terminal(command, environment()) as person:
            person.expect(ASKED)
            person.type(f"{QUESTION}\r")
            person.expect("Mia loved to")
            node.kill()
            person.expect(r"error: node a .*(closed|reset) the link")
            person.expect(ASKED)
            again = NodeProcess(node_command("a", "a", DEMO_STORE, "--port", str(node.port)))
            try:
                again.wait_ready()
                person.type(f"{QUESTION}\r")
                person.expect("Mia loved to")
                person.interrupt()
                person.expect("stopped")
                person.expect(ASKED)
                person.type("/exit\r")
                assert person.wait() == 0
            finally:
                again.close()


def test_a_prompt_is_interrupted_with_130() -> None:
    """Ctrl-C while one prompt is answered ends the program with 130 and no traceback."""
    with at_terminal(chat(*ENDLESS, "-p", QUESTION), environment()) as person:
        person.expect("Mia loved to")
        person.interrupt()
        assert person.wait() == 130
        assert "Traceback" not in person.rest


# The demo


def nodes_of(process: int) -> list[psutil.Process]:
    """The node processes that `process` has started."""
    children = psutil.Process(process).children(recursive=True)
    return [child for child in children if "expert_node" in " ".join(child.cmdline())]


def assert_gone(nodes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(nodes, timeout=20)
    assert alive == [] and len(gone) == len(nodes)


def test_the_demo_tells_a_story() -> None:
    """The demo shows the split, tells a story through its nodes, and stops them."""
    done = expert_net("demo", "--max-tokens", "12", "--nodes-count", "3")
    assert done.returncode == 0, done.stderr
    # How the story goes on depends on the rounding of the kernels.
    assert "Mia" in done.stdout.partition(f"> {QUESTION}\n")[2]
    assert all(f"node {name}" in done.stdout for name in "abc")
    assert "experts: 3 nodes, sum replies" in done.stderr


@pytest.fixture
def demo() -> Iterator[Terminal]:
    """A demo at a terminal, in the middle of an endless story."""
    command = [*COMMAND, "demo", "--precision", "f32", *ENDLESS]
    with at_terminal(command, environment()) as person:
        person.expect("Mia loved to")
        yield person


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_the_demo_leaves_no_node_behind(demo: Terminal, number: signal.Signals, code: int) -> None:
    """Whatever ends the demo, a kill included, its nodes end."""
    nodes = nodes_of(demo.process.pid)
    assert len(nodes) == 2
    os.kill(demo.process.pid, number)
    assert demo.wait() == code
    assert_gone(nodes)
    assert "Traceback" not in demo.rest


def test_the_demo_is_a_chat_for_a_person() -> None:
    """At a terminal the demo goes on as a chat, which /exit ends."""
    with at_terminal([*COMMAND, "demo", "--max-tokens", "4"], environment()) as person:
        person.expect("/help lists")
        person.expect(ASKED)
        person.type("Tell me a story about a duck.\r")
        person.expect(r"cut at 4 tokens")
        person.expect(ASKED)
        nodes = nodes_of(person.process.pid)
        person.type("/exit\r")
        assert person.wait() == 0
        assert_gone(nodes)


def test_a_demo_whose_nodes_do_not_start_says_why(tmp_path: Path) -> None:
    """A node that ends before it is ready ends the demo with what the node said."""
    (tmp_path / "expert_node").mkdir()
    (tmp_path / "expert_node" / "__init__.py").touch()
    (tmp_path / "expert_node" / "__main__.py").write_text("raise SystemExit('no luck today')")
    done = expert_net("demo", PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert "ended before it was ready; it said: no luck today" in done.stderr
