"""Lines: the lines of an input, decoded and counted."""

from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Any

from bytetx.cli.files.records import RankRequest, Record, RecordError, Source, Value
from bytetx.errors import InputError

_PEEK_BYTES = 8192


def unreadable(source: Source, error: OSError) -> InputError:
    return InputError(f"{source.name} cannot be read: {error.strerror or error}")


class Lines:
    """Decoded lines without their ends, counted; undecodable bytes become lone surrogates.

    number: of the last line read, from 1.  end_bytes: of all inputs, up to its end.
    """

    def __init__(self, file: BufferedReader, source: Source, start_bytes: int):
        """Raises InputError for a file of NUL bytes, which is no text.

        One in a csv's first line says so; in another line it is that record's error.
        """
        self._file = file
        self._source = source
        self._start_bytes = self.end_bytes = start_bytes
        self.number = 0
        try:
            beginning = file.peek(_PEEK_BYTES)[:_PEEK_BYTES]
        except OSError as error:
            raise unreadable(source, error) from error
        if source.format == "csv":
            beginning = beginning.partition(b"\n")[0]
        if b"\0" in beginning:
            raise InputError(
                f"{source.name} is not UTF-8 text: it holds NUL bytes; give a text file"
            )

    def __iter__(self) -> Iterator[str]:
        return (line.removesuffix("\n").removesuffix("\r") for line in self.with_ends())

    def with_ends(self) -> Iterator[str]:
        """The same with their ends, as a cell in quotes holds them."""
        while line := self._read():
            self.end_bytes += len(line)
            self.number += 1
            if self.number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield line.decode("utf-8", "surrogateescape")
        num_bytes = self.end_bytes - self._start_bytes
        if num_bytes < self._source.size_bytes:
            raise InputError(
                f"{self._source.name} became shorter while it was read: {num_bytes:,} of "
                f"{self._source.size_bytes:,} bytes; nothing may write to it meanwhile"
            )

    @property
    def _where(self) -> str:
        return f"{self._source.name} line {self.number}"

    def _read(self) -> bytes:
        try:
            return self._file.readline()
        except OSError as error:
            raise unreadable(self._source, error) from error

    def record(self, value: Value | RankRequest, kept: Mapping[str, Any]) -> Record:
        """The last line read as a record."""
        return Record(value, self.end_bytes, self._where, kept)

    def broken(self, error: Exception, kept: Mapping[str, Any]) -> Record:
        """The last line read as one that cannot be used."""
        where = self._where
        return Record(RecordError(where, error), self.end_bytes, where, kept)
