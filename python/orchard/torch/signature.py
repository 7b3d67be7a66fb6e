"""What torch calls an operation with, and where each argument is in the library's args struct.

    forward = Signature("softmax_forward")
    forward.schema                         # "(int wanted, Tensor x, Tensor? mask, ...) -> (...)"
    operands, options = forward.named(args)    # by the names of the C struct
    made = forward.new_outputs(operands, options, wanted)

One table serves kernel.c, its twin in Python (cpu.py), the fakes and the kernels for MPS. `wanted`
says by bits which outputs are made, in the order of the description: the others are empty tensors.
Bit 16 and up: those in fp32 where the description leaves a choice ("x/f32").
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from .. import _structs
from .._context import context
from .._exports import check_storage
from .._library import ArgumentError, DtypeError, OrchardError, ShapeError, check, lib
from .._operations import Operand, Option, describe
from .tensors import Arguments

ALL = 0xFFFF      # of the bits of `wanted`
F32_BIT = 16
DENSE, LIKE, ROWS_LIKE, ABSENT = range(4)  # how outputs lie, as in kernel.c

Operands = Dict[str, Optional[torch.Tensor]]
Options = Dict[str, Any]


class Argument(NamedTuple):
    name: str                # of the schema
    type: str                # as in kernel.c: "t", "d", "i", "b", "s", "w"
    optional: bool
    operand: Optional[Operand]
    option: Optional[Option]


class Layout(NamedTuple):
    kind: int
    like: str = ""           # the operand


_TYPES = {"Tensor": "t", "float": "d", "int": "i", "SymInt": "i", "bool": "b"}


def _torch_type(option: Option) -> str:
    kind = ("float" if option.kind == _structs.OPTION_F64 else "bool" if option.is_switch else
            "SymInt" if option.kind == _structs.OPTION_I64 else "int")
    return kind + "?" if option.flag else kind


class Signature:
    """`arguments`: a schema's, where it is not the description's own, with `renamed` options;
    `layouts`: of outputs that are not dense; `outputs`: how many of them there are."""

    def __init__(self, op: str, arguments: Optional[str] = None,
                 renamed: Mapping[str, str] = {}, layouts: Mapping[str, Layout] = {},
                 outputs: int = 16) -> None:
        self.op, self.layouts = op, layouts
        self.operation = describe(op)
        self.outputs = self.operation.outputs[:outputs]
        self.required = sum(1 << i for i, x in enumerate(self.outputs) if not x.optional)
        self.places = {x.name: i for i, x in enumerate(self.outputs)}
        if arguments is None:
            arguments = self._own_arguments()
        self.schema = (f"({arguments}) -> ("
                       + ", ".join(f"Tensor {x.name}" for x in self.outputs) + ")")
        self.arguments = [self._argument(*one.split(), renamed) for one in arguments.split(", ")]
        self.first = next(a.name for a in self.arguments if a.type == "t" and not a.optional)
        self._leading = next((x.name for x in self.operation.inputs if x.dtype == "float"), "")

    def _own_arguments(self) -> str:
        found = ["int wanted"]
        found += [f"Tensor{'?' if x.optional else ''} {x.name}" for x in self.operation.inputs]
        found += [f"{_torch_type(x)} {x.name}" for x in self.operation.options.values()
                  if not x.name.startswith("has_")]
        return ", ".join(found)

    def _argument(self, kind: str, name: str, renamed: Mapping[str, str]) -> Argument:
        optional, kind = kind.endswith("?"), _TYPES[kind.rstrip("?")]
        field = renamed.get(name, name)
        operand = self.operation.operands.get(field)
        if operand is not None:
            return Argument(name, kind, optional, operand, None)
        option = self.operation.options.get(field)
        if option is None:
            return Argument(name, "w", optional, None, None)
        return Argument(name, "s" if kind == "t" else kind, optional, None, option)

    # ---- By name ---------------------------------------------------------------------------------

    def named(self, args: Sequence[Any]) -> Tuple[Operands, Options, int]:
        """(operands, options, wanted) of a call with these arguments, by the names of the C struct;
        options that are absent are left out."""
        operands: Operands = {}
        options: Options = {}
        wanted = ALL
        for argument, value in zip(self.arguments, args):
            if argument.operand is not None:
                if value is None and not argument.optional:  # torch hands it on all the same
                    raise ArgumentError(f"{self.op}: {argument.name} is missing")
                operands[argument.operand.name] = value
            elif argument.option is None:
                wanted = value
            elif value is not None:
                options[argument.option.name] = (self._seed(argument.name, value)
                                                 if argument.type == "s" else value)
                if argument.option.flag:
                    options[argument.option.flag] = 1
        return operands, options, wanted

    def _seed(self, name: str, seed: torch.Tensor) -> int:
        if seed.dtype != torch.int64 or seed.dim():
            raise DtypeError(f"{self.op}: {name} must be one int64")
        check_storage(self.op, name, seed)
        return int(seed)

    # ---- Outputs ---------------------------------------------------------------------------------

    def _sizes(self, operands: Operands, options: Options) -> Dict[str, Tuple]:
        """What each sign of the shapes stands for: the first operand that has it says so."""
        known: Dict[str, Tuple] = {}
        trailing = options.get("dims") or 1
        for operand in self.operation.inputs:
            tensor, signs = operands.get(operand.name), operand.shape
            if tensor is None or signs is None:
                continue
            fixed = sum(trailing if sign == "+" else sign != "*" for sign in signs)
            leading = tensor.dim() - fixed
            if leading < 0 or (leading and "*" not in signs):
                raise ShapeError(f"{self.op}: {operand.name} has rank {tensor.dim()}")
            at = 0
            for sign in signs:
                count = leading if sign == "*" else trailing if sign == "+" else 1
                known.setdefault(sign, tuple(tensor.shape[at:at + count]))
                at += count
        return known

    def _dtype(self, rule: str, operands: Operands) -> Optional[torch.dtype]:
        """The first of the words that says one; None: they hang on operands that are absent."""
        for word in rule.split("/"):
            if word == "wide":
                leading = operands[self._leading]
                assert leading is not None
                return torch.float64 if leading.dtype == torch.float64 else torch.float32
            like = operands.get(word)
            if like is not None:
                return like.dtype
        return None

    def shapes(self, operands: Operands, options: Options, wanted: int
               ) -> List[Optional[Tuple[Tuple, torch.dtype]]]:
        """Sizes and dtype of each output, None where it is not made."""
        found: List[Optional[Tuple[Tuple, torch.dtype]]] = []
        known = self._sizes(operands, options)
        for i, output in enumerate(self.outputs):
            dtype = self._dtype(output.dtype, operands)
            there = all(sign in known for sign in output.shape or "")
            if dtype is None or not there or not (wanted | self.required) >> i & 1:
                found.append(None)
                continue
            if wanted >> (F32_BIT + i) & 1:
                dtype = torch.float32
            found.append((sum((known[sign] for sign in output.shape or ""), ()), dtype))
        return found

    def new_outputs(self, operands: Operands, options: Options, wanted: int
                    ) -> Tuple[Tuple[torch.Tensor, ...], Operands]:
        """(what torch gets, what the call writes to by name): fresh, as kernel.c makes them; empty
        where it is not made."""
        first = operands[self.first]
        assert first is not None
        try:
            made = self.make(first, operands, options, wanted)
        except OrchardError:
            self.complain(operands, options)
            raise
        return (tuple(first.new_empty(0) if x is None else x for x in made),
                {of.name: x for of, x in zip(self.outputs, made) if x is not None})

    def make(self, first: torch.Tensor, operands: Operands, options: Options, wanted: int
             ) -> List[Optional[torch.Tensor]]:
        """Each output, dense."""
        return [None if shape is None else first.new_empty(shape[0], dtype=shape[1])
                for shape in self.shapes(operands, options, wanted)]

    def complain(self, operands: Operands, options: Options) -> None:
        """Raises what the C library has to say of the inputs, if anything."""
        arguments = Arguments(self.op)
        arguments.fill(operands, options, lambda name, tensor: 0)
        check(lib.orchard_op_outputs(context(threads=1, backend="ref").handle, self.op.encode(),
                                     arguments.struct))
