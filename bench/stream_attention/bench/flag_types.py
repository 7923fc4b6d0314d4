"""Flag parsers whose errors name the rule and the nearest legal value; absl adds flag and value."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from stream_attention.bench.lengths import Lengths, parse_lengths
from stream_attention.bench.screen import reason, say, say_unprinted, stdout

MAX_COUNT = 2**31 - 1


def parse_flags(argv: Sequence[str]) -> list[str]:
    """For `app.run(main, flags_parser=...)`: exit status 2 for a bad flag, as for bad values.

    absl's own parser ends with 1, which means a failed route here, and so do its help flags, which
    are no failure. Help that cannot be printed ends with 5, as a report does.
    """
    program = Path(argv[0]).stem
    # --help shows the key flags of the program; these were defined on its behalf by this module.
    for flag in flags.FLAGS.flags_by_module_dict().get(__name__, ()):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    try:
        with contextlib.redirect_stdout(stdout()) as out:
            try:
                return list(flags.FLAGS(argv))
            except SystemExit:  # nothing but a help flag ends the process while flags are parsed
                out.flush()
                sys.exit(0)
    except OSError as error:
        if error.filename is not None or not _asks_for_help(argv):  # a flag file
            say(f"{program}: a file of flags cannot be read ({reason(error)}); use --help")
            sys.exit(2)
        sys.exit(say_unprinted(program, "the help", error))
    except flags.Error as error:
        say(f"{program}: {error}\nuse --help to see the flags")
        sys.exit(2)


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(argument.lstrip("-").startswith("help") for argument in argv[1:])


def refuse_arguments(argv: Sequence[str]) -> None:
    """`ValueError` for what is left beside the program's name once flags are parsed."""
    if len(argv) > 1:
        raise ValueError(f"argument {argv[1]!r}: only flags are taken, as --name=value; use --help")


class CountParser(flags.ArgumentParser):
    """An int in `low..high`; `nearest` is what the error suggests for text that is no number."""

    def __init__(self, low: int, nearest: int, high: int = MAX_COUNT) -> None:
        self.low = low
        self.nearest = nearest
        self.high = high

    def parse(self, argument: str | int) -> int:
        rule = f"must be an int >= {self.low}"
        try:
            value = int(argument)
        except ValueError:
            raise ValueError(f"{rule}; use {self.nearest}") from None
        if value < self.low:
            raise ValueError(f"{rule}; use {self.low}")
        if value > self.high:
            raise ValueError(f"must be an int in {self.low}..{self.high}; use {self.high}")
        return value

    def flag_type(self) -> str:
        return "int"


class ChoiceParser(flags.ArgumentParser):
    """One of `choices`, case-sensitive; short names may map to long ones."""

    def __init__(self, choices: Sequence[str], aliases: dict[str, str] | None = None) -> None:
        self.choices = tuple(choices)
        self.aliases = aliases or {}

    def parse(self, argument: str) -> str:
        value = self.aliases.get(argument, argument)
        if value not in self.choices:
            known = [*self.choices, *self.aliases]
            folded = {name.lower(): name for name in known}
            close = difflib.get_close_matches(argument.lower(), list(folded), n=1, cutoff=0.0)
            raise ValueError(f"must be one of {', '.join(known)}; use {folded[close[0]]}")
        return value

    def flag_type(self) -> str:
        return "choice"


class LengthsParser(flags.ArgumentParser):
    """KV lengths in the language of `stream_attention.bench.lengths`."""

    def parse(self, argument: str | Lengths) -> Lengths:
        return argument if isinstance(argument, Lengths) else parse_lengths(argument)

    def flag_type(self) -> str:
        return "lengths"


class LengthsSerializer(flags.ArgumentSerializer):
    """Prints lengths as they are written."""

    def serialize(self, value: Lengths) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class FlagDefiner:
    """Defines flags of these kinds in one `FlagValues`."""

    values: flags.FlagValues

    def count(
        self,
        name: str,
        default: int | None,
        help_text: str,
        *,
        low: int,
        nearest: int,
        high: int = MAX_COUNT,
    ) -> None:
        """An int flag with bounds."""
        flags.DEFINE(CountParser(low, nearest, high), name, default, help_text, self.values)

    def choice(
        self,
        name: str,
        default: str | None,
        choices: Sequence[str],
        help_text: str,
        aliases: dict[str, str] | None = None,
    ) -> None:
        """A flag with a fixed set of values."""
        flags.DEFINE(ChoiceParser(choices, aliases), name, default, help_text, self.values)

    def lengths(self, name: str, help_text: str) -> None:
        """A flag for KV lengths."""
        flags.DEFINE(LengthsParser(), name, None, help_text, self.values, LengthsSerializer())

    def text(self, name: str, default: str | None, help_text: str) -> None:
        """A flag for any text."""
        flags.DEFINE_string(name, default, help_text, self.values)

    def names(self, name: str, help_text: str) -> None:
        """A flag for names separated by commas, none by default."""
        flags.DEFINE_list(name, [], help_text, self.values)

    def repeated(self, name: str, help_text: str) -> None:
        """A flag that may be given several times, none by default."""
        flags.DEFINE_multi_string(name, [], help_text, self.values)

    def switch(self, name: str, default: bool | None, help_text: str) -> None:
        """A flag that is on or off; `None` tells one that was not given."""
        flags.DEFINE_bool(name, default, help_text, self.values)
