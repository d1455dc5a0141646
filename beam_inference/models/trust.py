"""How far the files of a network are trusted: which code that they carry may run."""

from __future__ import annotations

from enum import IntEnum


class Trust(IntEnum):
    """What may run of the code that files of a network carry.

    Attributes:
        NOTHING: no such code.
        PICKLES: what unpickling a file runs; ``--allow_pickle``.
        CODE: that, and Python source in packages; ``--trust_model``.
    """

    NOTHING = 0
    PICKLES = 1
    CODE = 2

    @classmethod
    def of_flags(cls, *, allow_pickle: bool, trust_model: bool) -> Trust:
        """What the flags of a command say."""
        if trust_model:
            return cls.CODE
        return cls.PICKLES if allow_pickle else cls.NOTHING

    @property
    def allows_pickles(self) -> bool:
        """Whether unpickling may run code."""
        return self >= Trust.PICKLES

    @property
    def allows_source(self) -> bool:
        """Whether Python source in packages may run."""
        return self >= Trust.CODE
