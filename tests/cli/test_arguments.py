"""The words of the command line: that its examples can be typed, and that shells complete it."""

import shlex
import subprocess

import pytest

from beam_inference.cli.arguments import command_parser
from beam_inference.cli.main import main


def examples():
    """Every command's, as its help shows them; an empty one where it shows none."""
    (action,) = (action for action in command_parser()._actions if isinstance(action.choices, dict))
    for name, parser in action.choices.items():
        lines = [
            line.strip()
            for line in parser.epilog.splitlines()
            if line.startswith("  beam-inference ")
        ]
        yield from ((name, line) for line in lines or [""])


@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_every_command_has_examples_that_can_be_typed(name, line):
    program, *words = shlex.split(line.partition(" > ")[0])
    known, beam_flags = command_parser().parse_known_args(words)
    assert (program, words[0]) == ("beam-inference", name)
    assert not beam_flags or known.takes_beam_flags
    assert all(flag.startswith("--") for flag in beam_flags)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_can_complete_the_words(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "pyramid" in script
    assert "max_failed_chunks" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
