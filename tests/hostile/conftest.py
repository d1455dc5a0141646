"""What hostile tests share: the command line gives one clear message, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from beam_inference.cli.main import main


def run_words(words: Sequence[object]) -> int:
    """The exit code of a command line."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:  # of argparse
        return int(str(end.code))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[object]], str]:
    """A function that gives a command that must be refused with one clear message: its text."""

    def refuse(words: Sequence[object]) -> str:
        code = run_words(words)
        out, message = capsys.readouterr()
        assert code == 2, (code, message)
        assert message.strip()
        assert "not foreseen" not in message
        assert "Traceback" not in message
        assert len(message) < 10_000
        assert not any(character in out + message for character in "\x1b\x07\x08\r\x9b\u202e")
        return message

    return refuse
