"""Reads records from csv and tsv; a malformed record costs its own lines and no other record.

A record is what csv's grammar says, quoted cells with line ends in them included, where it has as
many cells as the header. Where it is not one, its quotes say nothing about where it ends: reading
goes on at the next line that begins a record with the right number of cells, and the lines before
that one are the error of one row. What is read depends on the input's bytes alone, so that a job
that resumes finds the same rows.
"""

import csv
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bytetx.cli.files.lines import Lines
from bytetx.cli.files.records import (
    BadLine,
    MalformedRecord,
    Record,
    RecordError,
    Shape,
    Source,
    check_columns,
    refuse_undecodable,
    take_value,
)
from bytetx.errors import InputError

# A cell may be as long as a text is; csv's own limit is 128 KiB.
csv.field_size_limit(sys.maxsize)

# A record of more than one line may be so long, so that a quote that never ends is found in bounded
# memory; each line counts as more characters than it has, for it is an object.
_MAX_CHARACTERS = 1 << 26
_LINE_CHARACTERS = 200

# csv's errors, which are for programmers, and what to say instead.
_PROBLEMS = (
    ("unexpected end of data", "a quote that never ends"),
    ("new-line character seen", "a carriage return outside quotes"),
    ("expected after", "a quote inside a cell in quotes is to be written twice"),
)

# The first quote in the line that ends a quoted cell, where two quotes stand for one.
_END_OF_CELL = re.compile('(?:[^"]|"")*?"(?!")')


def read_csv(source: Source, lines: Lines, shape: Shape) -> Iterator[Record]:
    """One record a row below the header.

    Raises InputError for a header that cannot be read or lacks a column, and for an input that
    cannot be read to its end.
    """
    ahead = _LinesAhead(lines)
    is_tsv = source.path is not None and source.path.suffix.lower() == ".tsv"
    table = _Table(ahead, delimiter="\t" if is_tsv else ",")
    header = _read_header(source, table)
    check_columns(source, header, shape)
    table.num_cells = len(header)
    while (line := ahead.get(0)) is not None:
        row = table.parse(0)
        if row.cells == []:  # a blank line
            ahead.drop(1)
        elif table.is_record(row) and not table.is_stray(0, row):
            end_bytes = ahead.drop(row.num_lines)
            where = f"{source.name} line {line.number}"
            yield _record(row, header, shape, where, end_bytes)
        else:
            problem = row.problem(len(header))
            end = table.drop_malformed(row)
            lost = f"line {line.number}"
            if end.number > line.number:
                lost = f"lines {line.number} to {end.number}"
            error = MalformedRecord(f"{source.name} {lost}", problem)
            yield Record(error, end.end_bytes, f"{source.name} {lost}", shape.kept({}))


def _read_header(source: Source, table: "_Table") -> list[str]:
    row = table.parse(0)
    if not row.num_lines:
        raise InputError(f"{source.name} is empty; a csv needs a header line with column names")
    if row.has_nul:
        raise InputError(f"{source.name} is not UTF-8 text: it holds NUL bytes; give a text file")
    header, problem = row.cells, row.error
    if header is not None:
        table.num_cells = len(header)
        if row.num_lines > 1 and table.are_records(1, row.num_lines):
            header, problem = None, "a quote in it reaches into the rows below"
    if header is None:
        raise InputError(f"{source.name} has no header that can be read: {problem}")
    table.lines.drop(row.num_lines)
    return header


class _CsvLine(NamedTuple):
    """A line with its end.  number: from 1.  end_bytes: of all inputs, up to its end."""

    text: str
    number: int
    end_bytes: int


class _LinesAhead:
    """The lines that are not dropped yet, read as far as they are asked for."""

    def __init__(self, lines: Lines):
        self._lines, self._texts = lines, lines.with_ends()
        self._waiting: deque[_CsvLine] = deque()

    def get(self, index: int) -> _CsvLine | None:
        """Line `index` of those that are left; None behind the last one.

        Raises InputError where the input cannot be read that far.
        """
        while len(self._waiting) <= index:
            text = next(self._texts, None)
            if text is None:
                return None
            self._waiting.append(_CsvLine(text, self._lines.number, self._lines.end_bytes))
        return self._waiting[index]

    def drop(self, count: int) -> int:
        """Drops the first lines, which were got. Returns end_bytes of the last of them."""
        for _ in range(count):
            last = self._waiting.popleft()
        return last.end_bytes


@dataclass(frozen=True, slots=True)
class _CsvRow:
    """The reading of the lines from one on.

    cells: None where they are no record, for the reason in error.  num_lines: that were read.
    """

    cells: list[str] | None
    num_lines: int
    error: str = ""
    has_nul: bool = False

    def problem(self, num_cells: int) -> str:
        if self.has_nul:
            return "it holds a NUL byte"
        if self.cells is None:
            return f"malformed: {self.error}"
        if len(self.cells) != num_cells:
            return f"{len(self.cells)} cells, where the header has {num_cells}"
        return "malformed: a quote in it reaches into the rows below"


class _Table:
    """The lines as rows.  num_cells: of a record, as the header has them."""

    def __init__(self, lines: _LinesAhead, *, delimiter: str):
        self.lines, self._delimiter = lines, delimiter
        self.num_cells = 0

    def parse(self, index: int) -> _CsvRow:
        """The row that begins at line `index`."""
        num_lines, size, has_nul = 0, 0, False

        def texts() -> Iterator[str]:
            nonlocal num_lines, size, has_nul
            while (line := self.lines.get(index + num_lines)) is not None:
                num_lines += 1
                has_nul |= "\0" in line.text
                size += (len(line.text) + _LINE_CHARACTERS) * (num_lines > 1)
                if size > _MAX_CHARACTERS:
                    raise csv.Error(f"a quote that has not ended after {num_lines - 1:,} lines")
                yield line.text

        # Strict, so that a quote that never ends is an error and not a cell as long as the file.
        rows = csv.reader(texts(), delimiter=self._delimiter, strict=True)
        try:
            return _CsvRow(next(rows, None), num_lines, has_nul=has_nul)
        except csv.Error as error:
            problem = next((own for its, own in _PROBLEMS if its in str(error)), str(error))
            return _CsvRow(None, num_lines, problem, has_nul)

    def is_record(self, row: _CsvRow) -> bool:
        return row.cells is not None and len(row.cells) == self.num_cells and not row.has_nul

    def are_records(self, start: int, stop: int) -> bool:
        """Whether the lines from start up to stop are records, one after the other."""
        while start < stop:
            row = self.parse(start)
            if not self.is_record(row):
                return False
            start += row.num_lines
        return start == stop

    def is_stray(self, index: int, row: _CsvRow) -> bool:
        """Whether a record of several lines ends in the quote that begins a cell of another one.

        Such a quote stands behind a delimiter, the lines up to it are records, as are those from
        its own line on, and those behind the row are none.
        """
        behind = index + row.num_lines
        last = behind - 1
        return (
            row.num_lines > 1
            and self._before_end_of_cell(last).endswith(self._delimiter)
            and self.are_records(index + 1, last)
            and self.is_record(self.parse(last))
            and not self.is_record(self.parse(behind))
        )

    def drop_malformed(self, row: _CsvRow) -> _CsvLine:
        """Drops the lines of the row at line 0, which is no record. Returns the last of them."""
        last = row.num_lines - 1
        is_whole = row.cells is not None and not self.is_stray(0, row)
        if is_whole and last and len(row.cells or ()) != self.num_cells:
            # Its quotes are to be trusted where what lies between them is no records.
            has_records = last > 1 and self.are_records(1, last)
            before = self._before_end_of_cell(last)
            is_whole = not has_records and before != "" and before[-1] != self._delimiter
        if is_whole:
            return self._drop(row.num_lines)
        end = self._drop(1)
        while self.lines.get(0) is not None:
            following = self.parse(0)
            if self.is_record(following):
                break
            is_blank = following.cells == []
            dropped = self._drop(1)
            end = end if is_blank else dropped
        return end

    def _drop(self, count: int) -> _CsvLine:
        line = self.lines.get(count - 1)
        assert line is not None  # it was parsed
        self.lines.drop(count)
        return line

    def _before_end_of_cell(self, index: int) -> str:
        """Return the part of line `index` before the quote that ends a cell of the lines above it.

        Behind a delimiter, or at the start, it may as well be one that begins a cell.
        """
        line = self.lines.get(index)
        found = None if line is None else _END_OF_CELL.match(line.text)
        return "?" if line is None or found is None else line.text[: found.end() - 1]


def _record(row: _CsvRow, header: list[str], shape: Shape, where: str, end_bytes: int) -> Record:
    cells = dict(zip(header, row.cells or (), strict=True))
    kept = _kept_cells(cells, shape)
    try:
        value = take_value(cells, shape)
        refuse_undecodable(value if isinstance(value, tuple) else (value,))
        refuse_undecodable(cells[name] for name in shape.keep)
        return Record(value, end_bytes, where, kept)
    except BadLine as error:
        return Record(RecordError(where, error), end_bytes, where, kept)


def _kept_cells(row: Mapping[str, str], shape: Shape) -> dict[str, str | None]:
    """Cells to copy, None where one is not UTF-8."""
    kept = shape.kept(row)
    for name, cell in kept.items():
        try:
            refuse_undecodable((cell,))
        except BadLine:
            kept[name] = None
    return kept
