"""The two ways in which vtlab says no: to a call (`ContractError`) and to a file (`FormatError`)."""

from __future__ import annotations

from pathlib import Path


class ContractError(ValueError):
    """A call that an op's contract does not allow; raised before anything is computed or written.

    Attributes
    ----------
    op, argument : the op and the argument at fault (`argument` is "" when the call as a whole is).
    got, want : what was given and what the contract wants, in words.
    """

    def __init__(self, op: str, argument: str, got: object, want: object):
        self.op, self.argument, self.got, self.want = op, argument, str(got), str(want)
        where = f"{op}({argument})" if argument else op
        super().__init__(f"{where}: got {self.got}, want {self.want}")

    def __reduce__(self):
        return type(self), (self.op, self.argument, self.got, self.want)


class FormatError(ValueError):
    """A file that breaks its format; raised before any of its tensors is handed out.

    Attributes
    ----------
    file : the file's path. offset : byte offset of the fault, or None where it has none.
    field : the field at fault, in the format's own words. got, want : found and expected, in words.
    """

    def __init__(self, file: str | Path, offset: int | None, field: str, got: object, want: object):
        self.file, self.offset, self.field = str(file), offset, field
        self.got, self.want = str(got), str(want)
        at = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{self.file}{at}: {field}: got {self.got}, want {self.want}")

    def __reduce__(self):
        return type(self), (self.file, self.offset, self.field, self.got, self.want)
