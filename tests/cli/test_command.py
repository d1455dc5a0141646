"""The parsers of the commands: their examples are valid, and shells complete them."""

import json
import shlex
import subprocess

import pytest

from beam_inference.beam.flags import beam_options
from beam_inference.cli.command import BEAM_FLAGS, Options
from beam_inference.cli.main import command_parser, main
from beam_inference.config.plugins import GROUPS, list_plugins


def examples():
    """The examples in every command's help; an empty one for a command without any."""
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
    arguments, beam_flags = command_parser().parse_known_args(words)
    assert (program, words[0]) == ("beam-inference", name)
    assert not beam_flags or arguments.takes_beam_flags
    assert all(flag.startswith("--") for flag in beam_flags)


@pytest.mark.parametrize("place", BEAM_FLAGS)
def test_flags_of_beam_in_the_help_are_flags_of_beam(place, capsys):
    flags = BEAM_FLAGS[place].split()
    beam_options([flag.replace("…", "x") for flag in flags])
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    told = capsys.readouterr().out
    assert all(flag in told for flag in flags)


def test_values_that_look_like_flags_are_told_how_to_write(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "a.npy", "b", "--offset", "-7,1,2"])
    assert "needs an equals sign: --offset=-1" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_can_complete_the_words(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "pyramid" in script
    assert "max_failed_chunks" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_every_option_of_a_command_is_one_of_its_arguments(name, line):
    words = shlex.split(line.partition(" > ")[0])[1:]
    arguments, beam_flags = command_parser().parse_known_args(words)
    added_by_main = {
        "beam_flags": beam_flags,
        "command_line": words,
        "run_command": main,
        "parser": None,
    }
    vars(arguments).update(added_by_main)
    options = arguments.options.from_arguments(arguments)
    assert isinstance(options, Options)


def test_a_negative_price_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "job.yaml", "--calibrate", "--worker-price=-1"])
    assert "-1 is not a price" in capsys.readouterr().err


def test_plugins_lists_what_is_installed(capsys):
    assert main(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == [
        name for group in GROUPS for name in list_plugins(group)
    ]
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    for each in listed:
        assert each["name"] in table
        assert each["object"] in table
