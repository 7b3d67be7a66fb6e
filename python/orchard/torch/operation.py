"""One class makes an operation of the C library an operation of torch.

    SOFTMAX = Operation("softmax", forward, backward)         # their formulas in torch operations
    out, = SOFTMAX(x=x, mask=mask, dim=-1, log=False)         # differentiable, compiled, mapped

Of the library's description (names, shapes in letters, dtypes) it makes the ops
torch.ops.orchard.<name>_forward and <name>_backward, and orchard::<name>, which is the forward with
a rule for autograd, for compiled and exported programs; their kernels for CPU (kernel.c) and MPS,
their fakes, and their rules for autograd, vmap, autocast.

The grammar of names gives the derivative: `dx` is the gradient of `x`; an operand of backward that
has the name of one of forward's, `out` too, is that very tensor; `dout` is the cotangent of `out`,
and an output without one carries no gradient. Two parameters tell where a room's rule is another.

The formulas serve forward mode, gradients of gradients, calls that a device refuses, and tests.
They get operands and options by name, absent ones as None, halves as fp32, and return the outputs
in the order of the description, None for what is not wanted of them, in any dtype.

`wanted`, the first argument of the ops, has a bit for each output (signature.py).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from .._library import ArgumentError, UnsupportedError
from .._structs import MAX_RANK
from . import cpu, mps, tracing
from .checks import check_tensor
from .signature import F32_BIT, Operands, Options, Signature
from .transforms import grads_batched, no_autocast, one_by_one, pull, refuse_tangents, with_autograd

Maybe = Optional[Tensor]
Formula = Callable[..., Sequence[Maybe]]

library = torch.library.Library("orchard", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
HALVES = (torch.float16, torch.bfloat16)


def _as_tuple(made: Any) -> Tuple[Tensor, ...]:
    """An op of one result returns it as it is."""
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _as_torch(made: Sequence[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)


class _Call:
    """One of the two operations: its signature, its op, its formula."""

    def __init__(self, name: str, formula: Formula) -> None:
        self.name, self.formula = name, formula
        self.signature = Signature(name)
        self.inputs = [x.name for x in self.signature.operation.inputs]
        self.options = [a.name for a in self.signature.arguments if a.option is not None]
        self.outputs = [x.name for x in self.signature.outputs]
        self.defaults = [None if a.optional else False if a.type == "b" else 0
                         for a in self.signature.arguments if a.option is not None]
        self.define(name)
        self.op = getattr(torch.ops.orchard, name).default

    def define(self, name: str) -> None:
        library.define(name + self.signature.schema, tags=_TAGS)
        cpu.register(library, name, self.signature)
        library.impl(name, self._on_mps, "MPS")
        torch.library.register_fake(f"orchard::{name}", self._fake, lib=library)

    def __call__(self, *args: Any) -> Tuple[Tensor, ...]:
        """The op, with Orchard's exceptions; always a tuple."""
        try:
            return _as_tuple(self.op(*args))
        except RuntimeError as error:
            cpu.reraise(error)

    def args(self, wanted: int, given: Mapping[str, Any]) -> Tuple[Any, ...]:
        """The arguments of the schema."""
        return (wanted, *(given.get(name) for name in self.inputs),
                *(given.get(name, default) for name, default in zip(self.options, self.defaults)))

    def by_formula(self, *args: Any) -> List[Maybe]:
        """The outputs that are wanted, by torch's operations, which differentiate them."""
        operands, options, wanted = self.signature.named(args)
        first = operands[self.signature.first]
        assert first is not None
        given = {name: x.float() if x is not None and x.dtype in HALVES else x
                 for name, x in operands.items()}
        with no_autocast(first):
            made = self.formula(**given, **{name: options.get(name) for name in self.options})
            shapes = self.signature.shapes(operands, options, wanted)
            return [None if x is None or shape is None else x.to(shape[1])
                    for x, shape in zip(made, shapes)]

    def bits(self, names: Sequence[str]) -> int:
        return sum(1 << self.outputs.index(name) for name in names)

    def _fake(self, *args: Any) -> Any:
        operands, options, wanted = self.signature.named(args)
        first = operands[self.signature.first]
        assert first is not None
        for name, x in operands.items():
            if x is not None and x.device != first.device:
                raise ArgumentError(f"{self.name}: {name} is on {x.device}, "
                                    f"{self.signature.first} is on {first.device}")
        made, outputs = self.signature.new_outputs(operands, options, wanted)
        if first.is_meta and not isinstance(first, tracing.TRACED):  # no kernel will look later
            mps.launcher.check(self.name, {**operands, **outputs}, options)
        return _as_torch(made)

    def _on_mps(self, *args: Any) -> Any:
        operands, options, wanted = self.signature.named(args)
        made, outputs = self.signature.new_outputs(operands, options, wanted)
        try:
            mps.launcher.run(self.name, {**operands, **outputs}, options)
        except mps.Refused as refused:
            if mps.strict():
                raise mps.Refused(self.name, refused.reason, mps.STRICT) from None
            with torch.no_grad(), with_autograd():
                for fresh, x in zip(made, self.by_formula(*args)):
                    if x is not None:
                        fresh.copy_(x)
            mps.launcher.ran(self.name, "pytorch", refused.reason)
        return _as_torch(made)

    # ---- vmap ------------------------------------------------------------------------------------

    def map(self, call: Callable, count: int, in_dims: Sequence, args: Sequence) -> Tuple:
        """vmap's rule: one more leading dimension where shapes begin with "*", else the samples one
        after the other."""
        tensors = [(i, a.operand) for i, a in enumerate(self.signature.arguments)
                   if a.operand is not None and args[i] is not None]
        wanted = args[0] | self.signature.required
        leads = [(x.shape or "").startswith("*") for i, x in tensors if in_dims[i] is not None]
        leads += [(x.shape or "").startswith("*") for i, x in enumerate(self.signature.outputs)
                  if wanted >> i & 1]
        ranks = [args[i].dim() + (in_dims[i] is None) for i, _ in tensors]
        if not all(leads) or max(ranks) > MAX_RANK:
            return one_by_one(call, count, in_dims, args)
        folded = list(args)
        for i, operand in tensors:
            if in_dims[i] is not None:
                folded[i] = args[i].movedim(in_dims[i], 0)
            elif (operand.shape or "").startswith("*"):
                folded[i] = args[i].expand(count, *args[i].shape)
        for i, argument in enumerate(self.signature.arguments):
            if argument.name == "dim" and args[i] is not None and args[i] >= 0:
                folded[i] = args[i] - max(ranks) + 1  # from the end, where nothing was added
        made = call(*folded)
        return made, tuple(0 if wanted >> i & 1 else None for i in range(len(made)))


class Operation:
    """`forward`, `backward`: the formulas. Without the latter it is the derivative of the former,
    which suits where backward gets all of forward's inputs.

    operands   for an operand of backward that is another tensor of forward's: a function from the
               names of forward's inputs that were given to the name, {"x": lambda given: "sum"}
    gradients  for an input whose gradient has another name: {"residual": "dx"}
    autocast   torch's operation, "aten::softmax.int": inputs become fp32 where its would
    """

    def __init__(self, name: str, forward: Formula, backward: Optional[Formula] = None, *,
                 operands: Mapping[str, Callable[[Sequence[str]], str]] = {},
                 gradients: Mapping[str, str] = {}, autocast: str = "") -> None:
        self.name, self._operands = name, operands
        self.forward = _Call(name + "_forward", forward)
        self.backward = _Call(name + "_backward", backward or self._derived)
        self.cotangents = {"d" + x: x for x in self.forward.outputs
                           if "d" + x in self.backward.inputs}
        self.saved = [x for x in self.backward.inputs if x not in self.cotangents]
        named = {x: gradients.get(x, "d" + x) for x in self.forward.inputs}
        self.gradients = {x: gradient for x, gradient in named.items()
                          if gradient in self.backward.outputs}
        self.autocast = [device for device in ("cpu", "mps") if autocast and
                         torch._C._dispatch_has_kernel_for_dispatch_key(
                             autocast, f"Autocast{device.upper()}")]
        self._default = [x.name for x in self.forward.signature.outputs if not x.optional]
        self._known = self.forward.inputs + self.forward.outputs
        self._always_at = [self._known.index(x) for x in self.saved if x not in operands]
        self.forward.define(name)
        self.op = getattr(torch.ops.orchard, name).default
        self.Forward, self.Backward = self._functions()
        torch.library.register_autograd(f"orchard::{name}", self.Forward.backward,
                                        setup_context=self.Forward.setup_context, lib=library)
        refuse_tangents(library, self.op, name, f"orchard.torch.{name}")
        for call, op in ((self.forward, self.forward.op), (self.forward, self.op),
                         (self.backward, self.backward.op)):
            self._register_vmap(call, op)

    @staticmethod
    def _register_vmap(call: _Call, op: Any) -> None:
        def rule(info: Any, in_dims: Sequence, *args: Any) -> Tuple:
            made, dims = call.map(lambda *x: _as_tuple(op(*x)), info.batch_size, in_dims, args)
            return _as_torch(made), _as_torch(dims)

        torch.library.register_vmap(op, rule, lib=library)

    # ---- The call --------------------------------------------------------------------------------

    def __call__(self, outputs: Sequence[str] = (), **given: Any) -> Tuple[Tensor, ...]:
        """The outputs of these names, without any those that are always made. Operands and options
        by name; absent ones may be left out."""
        given = self._checked(given)
        names = outputs or self._default
        made = self._run(self.forward.bits(names), given)
        return tuple(made[self.forward.outputs.index(name)] for name in names)

    def _checked(self, given: Dict[str, Any]) -> Dict[str, Any]:
        first = self.forward.signature.first
        check_tensor(self.name, first, given.get(first), None)
        device = given[first].device
        for name in self.forward.inputs:
            if name != first and given.get(name) is not None:
                check_tensor(self.name, name, given[name], device, first)
        if device.type in self.autocast and torch.is_autocast_enabled(device.type):
            for name in self.forward.inputs:
                if given.get(name) is not None and given[name].dtype in HALVES:
                    given[name] = given[name].float()
        return given

    def _run(self, wanted: int, given: Dict[str, Any]) -> Sequence[Maybe]:
        """All outputs, by the right Function, op or formula."""
        forward = self.forward
        tensors = [given[x] for x in forward.inputs if given.get(x) is not None]
        if tracing.forward_mode() and (tracing.compiling() or tracing.tangents(*tensors)):
            return forward.by_formula(*forward.args(wanted, given))
        mapped = tracing.functorch_active()
        if mapped and tracing.compiling():
            return forward.by_formula(*forward.args(wanted, given))
        records = torch.is_grad_enabled() and (mapped or any(x.requires_grad for x in tensors))
        if records:
            self._check_differentiable(given)
        program = tracing.recording_graph()
        if records or program:
            kept = [self._source(x, given) for x in self.saved]
            wanted |= forward.bits([x for x in kept if x in forward.outputs])
        args = forward.args(wanted, given)
        try:
            if program or (records and tracing.compiling()):
                return _as_tuple(self.op(*args))
            if records:
                return self.Forward.apply(*args)
        except RuntimeError as error:
            cpu.reraise(error)
        return forward(*args)

    def _check_differentiable(self, given: Mapping[str, Any]) -> None:
        for name in self.forward.inputs:
            x = given.get(name)
            if x is not None and x.requires_grad and name not in self.gradients:
                raise UnsupportedError(f"{self.name}: {name} requires a gradient, which Orchard "
                                       "does not compute; detach it")

    def _saved_at(self, operands: Sequence[Maybe]) -> List[int]:
        """Where backward's tensors are among forward's operands and outputs."""
        if not self._operands:
            return self._always_at
        given = {x: of for x, of in zip(self.forward.inputs, operands)}
        return [self._known.index(self._source(x, given)) for x in self.saved]

    def _source(self, name: str, given: Mapping[str, Any]) -> str:
        """Which operand of forward's is backward's `name`."""
        rule = self._operands.get(name)
        return rule([x for x in self.forward.inputs if given.get(x) is not None]) if rule else name

    # ---- Derivatives -----------------------------------------------------------------------------

    def _differentiate(self, *args: Any) -> Sequence[Maybe]:
        """The backward op, differentiable itself where gradients are being recorded."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if ((tracing.forward_mode() and tracing.tangents(*tensors))
                or (torch.is_grad_enabled() and grads_batched(*tensors))):
            return self.backward.by_formula(*args)
        if torch.is_grad_enabled():
            return self.Backward.apply(*args)
        return self.backward(*args)

    def _derived(self, **given: Any) -> List[Maybe]:
        """The formula of backward as the derivative of forward's."""
        inputs = {x: given[x] for x in self.forward.inputs
                  if given.get(x) is not None and x in self.gradients}
        constant = {x: given.get(x) for x in self.forward.inputs if x not in inputs}
        constant.update({x: given.get(x) for x in self.forward.options})
        present = [x for x in self.cotangents if given.get(x) is not None]

        def function(*tensors: Tensor) -> Tuple[Tensor, ...]:
            made = self.forward.formula(**dict(zip(inputs, tensors)), **constant)
            by_name = dict(zip(self.forward.outputs, made))
            return tuple(by_name[self.cotangents[x]] for x in present)

        found = dict(zip(inputs, pull(function, list(inputs.values()),
                                      tuple(given[x] for x in present))))
        return [found.get(name[1:]) for name in self.backward.outputs]

    def _functions(self) -> Tuple[Type[torch.autograd.Function], Type[torch.autograd.Function]]:
        operation, forward, backward = self, self.forward, self.backward
        record = torch.autograd.Function.apply
        first_option = 1 + len(forward.inputs)
        with_cotangent = forward.bits(list(self.cotangents.values()))
        # Of each operand of backward: the output whose cotangent it is, None for a saved tensor;
        # of each of its options, and of each gradient: the place among forward's and its own.
        sources = [(forward.outputs.index(self.cotangents[x.name]), not x.optional)
                   if x.name in self.cotangents else (None, False)
                   for x in backward.signature.operation.inputs]
        options = [forward.options.index(x) for x in backward.options]
        places = [backward.outputs.index(self.gradients[x]) if x in self.gradients else None
                  for x in forward.inputs]

        class Forward(torch.autograd.Function):
            """The forward for autograd and torch.func."""

            @classmethod
            def apply(cls, *args: Any) -> Any:
                # Function.apply without its questions, which take longer than a small call.
                if tracing.functorch_active():
                    return record.__func__(cls, *args)
                return super(torch.autograd.Function, cls).apply(*args)

            @staticmethod
            def forward(*args: Any) -> Tuple[Tensor, ...]:
                return forward(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: Sequence, output: Any) -> None:
                made = _as_tuple(output)
                operands = inputs[1:first_option]
                known = (*operands, *made)
                ctx.save_for_backward(*(known[i] for i in operation._saved_at(operands)))
                ctx.options = inputs[first_option:]
                ctx.dtypes = [None if x is None else x.dtype for x in operands]
                ctx.blanks = [(x.shape, x.dtype, x.device) for x in made]
                ctx.set_materialize_grads(False)
                spoken = (inputs[0] | forward.signature.required) & with_cotangent
                if spoken != (1 << len(made)) - 1:
                    ctx.mark_non_differentiable(*(x for i, x in enumerate(made)
                                                  if not spoken >> i & 1))

            @staticmethod
            def backward(ctx: Any, *cotangents: Maybe) -> Tuple[Maybe, ...]:
                needed = ctx.needs_input_grad[1:first_option]
                wanted = operation._wanted(needed, ctx.dtypes)
                if not wanted or all(x is None for x in cotangents):
                    return (None,) * len(ctx.needs_input_grad)
                saved = iter(ctx.saved_tensors)
                given: List[Any] = []
                for output, required in sources:
                    x = next(saved) if output is None else cotangents[output]
                    if x is None and required:
                        shape, dtype, device = ctx.blanks[output]
                        x = torch.zeros(shape, dtype=dtype, device=device)
                    given.append(x)
                made = operation._differentiate(wanted, *given, *(ctx.options[i] for i in options))
                return (None, *(made[places[i]] if need and places[i] is not None else None
                                for i, need in enumerate(needed)), *(None for _ in ctx.options))

            @staticmethod
            def vmap(info: Any, in_dims: Sequence, *args: Any) -> Tuple:
                return forward.map(Forward.apply, info.batch_size, in_dims, args)

        class Backward(torch.autograd.Function):
            """Makes backward itself differentiable (create_graph=True), by the formula."""

            @staticmethod
            def forward(*args: Any) -> Tuple[Tensor, ...]:
                return backward(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: Sequence, output: Any) -> None:
                ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
                ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
                ctx.set_materialize_grads(False)
                wanted = inputs[0] | backward.signature.required
                ctx.mark_non_differentiable(*(x for i, x in enumerate(output)
                                              if not wanted >> i & 1))

            @staticmethod
            def backward(ctx: Any, *cotangents: Maybe) -> Tuple[Maybe, ...]:
                args = [other if x is None else x
                        for x, other in zip(ctx.saved_tensors, ctx.others)]
                places = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
                chosen = [i for i, x in enumerate(cotangents) if x is not None]
                if not chosen or not places:
                    return (None,) * len(args)

                def function(*at: Tensor) -> Tuple[Tensor, ...]:
                    moved = dict(zip(places, at))
                    made = backward.by_formula(*(moved.get(i, x) for i, x in enumerate(args)))
                    return tuple(made[i] for i in chosen)  # type: ignore[misc]

                found = dict(zip(places, pull(function, [args[i] for i in places],
                                              tuple(cotangents[i] for i in chosen))))
                return tuple(found.get(i) for i in range(len(args)))

            @staticmethod
            def vmap(info: Any, in_dims: Sequence, *args: Any) -> Tuple:
                return backward.map(Backward.apply, info.batch_size, in_dims, args)

        return Forward, Backward

    def _wanted(self, needed: Sequence[bool], dtypes: Sequence[Optional[torch.dtype]]) -> int:
        """The bits of the gradients that these inputs need, in fp32 for those that are so beside a
        16-bit call."""
        wanted = 0
        halves = any(x in HALVES for x in dtypes)
        for name, need, dtype in zip(self.forward.inputs, needed, dtypes):
            if need and name in self.gradients:
                place = self.backward.outputs.index(self.gradients[name])
                wanted |= 1 << place
                if halves and dtype == torch.float32 and (
                        self.backward.signature.outputs[place].dtype.endswith("/f32")):
                    wanted |= 1 << F32_BIT + place
        return wanted
