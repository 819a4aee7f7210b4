"""docs/troubleshooting.md keeps up with the sentences, classes and options of the source.

The page quotes the fixed words of a sentence as code in a heading of level 3, or as emphasised code
(*`…`*) in the text. What is filled in when a sentence is said stands there as "…".
"""

from __future__ import annotations

import re
import shlex

import click

from expert_driver.cli import group as expert_net
from expert_node.cli import cli as expert_node
from tests.support.sentences import ROOT, Sentence, error_classes, literals, sentences

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

_HEADING = re.compile(r"^### (.*)$", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_IN_TEXT = re.compile(r"\*`([^`\n]+)`\*")

HEADINGS = _HEADING.findall(PAGE)
IN_HEADINGS = [span for heading in HEADINGS for span in _SPAN.findall(heading)]
IN_TEXT = _IN_TEXT.findall(PAGE)
QUOTED = IN_HEADINGS + IN_TEXT

CLASSES = error_classes()


def test_headings_are_quotations() -> None:
    """Each entry is headed by nothing but sentences as they are printed."""
    for heading in HEADINGS:
        assert re.fullmatch(r"`[^`]+`( · `[^`]+`)*", heading), heading


def test_no_quotation_stands_twice() -> None:
    """Each sentence has one entry, and so one place to look it up."""
    assert sorted(IN_HEADINGS) == sorted(set(IN_HEADINGS))


def test_quotations_are_in_the_source() -> None:
    """Whatever the page quotes is said by the programs, word for word."""
    text = "\n".join(literals())
    assert [fragment for fragment in QUOTED if fragment not in text] == []


def is_internal(sentence: Sentence) -> bool:
    """Sentences that need no entry: what they mean is said by another one that carries them."""
    maker, file = sentence.maker, sentence.where.partition(":")[0]
    # What a peer did wrong in a frame: shown after "sends what is not the protocol".
    if maker in ("RemoteProtocolError", "LocalProtocolError"):
        return file.startswith("protocol/")
    # Details of a damaged manifest: shown after "the manifest is damaged".
    if maker == "_refuse":
        return file == "expert_network/store/manifest.py"
    # Cancelled is not shown. The others are what a class puts around what it was given.
    return maker == "Cancelled" or re.fullmatch(r"(node )?\W*", sentence.text) is not None


def test_sentences_of_errors_are_on_the_page() -> None:
    """Every sentence that an error is made with has an entry."""
    shown = [sentence for sentence in sentences() if not is_internal(sentence)]
    assert [
        sentence for sentence in shown if not any(words in sentence.text for words in QUOTED)
    ] == []


def test_sentences_are_found() -> None:
    """The search sees variables, helpers, choices, joined strings and what helpers return."""
    found = {(sentence.maker, sentence.text) for sentence in sentences()}
    assert {
        ("NodeClosed", "closed the link in the middle of a frame"),
        ("NodeTimeout", "accepted the connection and did not answer within … s"),
        ("CheckpointError", "its weights are GGUF"),
        ("BackendMissing", "MLX has no backend in this environment (…); …."),
        ("HubError", "it has no revision …"),
        ("_bad_block", "is cut short"),
        ("not_a_node", "speaks TLS, and nodes speak plain HTTP"),
        ("UsageError", "the prompt is empty."),
        ("ErrorReply", "node … has … links, the most it takes"),
    } <= found
    assert {kind.__name__ for kind in CLASSES if not kind.__subclasses__()} <= (
        {maker for maker, _ in found} | {"NotANode"}  # made by the helper not_a_node alone
    )


def test_exit_codes_are_those_of_the_classes() -> None:
    """The table of exit codes names every class of errors.py, once, beside its exit code."""
    table = PAGE.partition("## Exit codes")[2]
    rows = re.findall(r"^\| (\d+) \|([^|]*)\|", table, re.MULTILINE)
    named = [(name, int(code)) for code, names in rows for name in _SPAN.findall(names)]
    assert sorted(named) == sorted((kind.__name__, kind.exit_code) for kind in CLASSES)


def commands(text: str) -> list[str]:
    """What a page says to type: the lines of its shell blocks, and the code in its text."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = [*"".join(blocks).splitlines(), *_SPAN.findall(text)]
    return [line for line in code if re.match(r"expert-(net|node)\b|--", line)]


def test_commands_and_options_exist() -> None:
    """What README and this page say to type is a command, with options that it has."""
    lines = [*commands(README), *commands(PAGE)]
    assert len(lines) > 20
    assert {line: unknown for line in lines if (unknown := unknown_options(line))} == {}


def unknown_options(line: str) -> set[str]:
    words = shlex.split(line.replace("…", "x"), comments=True)
    if words[0].startswith("--"):
        known = options_of(expert_net) | options_of(expert_node)
    else:
        command, words = follow(words)
        known = options_of(command)
    return {word.partition("=")[0] for word in words if word.startswith("-")} - known


def follow(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that a line calls, and the words after its name."""
    command: click.Command = {"expert-net": expert_net, "expert-node": expert_node}[words.pop(0)]
    while isinstance(command, click.Group):
        context = click.Context(command)
        if words and words[0] in command.list_commands(context):
            command_found = command.get_command(context, words.pop(0))
        elif words and words[0] == "--version":
            break
        else:
            command_found = command.get_command(context, "run")
        assert command_found is not None
        command = command_found
    return command, words


def options_of(command: click.Command) -> set[str]:
    """The options of a command, and of those below it."""
    context = click.Context(command)
    found = {name for parameter in command.get_params(context) for name in parameter.opts}
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found |= options_of(below)
    return found
