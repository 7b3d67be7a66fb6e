"""Every room of orchard.torch: its operations on the calls of src/<room>/<room>_cases.txt, in every
dtype and layout, against its formula in float64; its functions on the samples of its file, against
torch's own; and all that torch may do with them. Nothing here names a room.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import sys
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import orchard
import orchard.torch
from orchard.torch import cpu, mps
from orchard.torch.operation import Operation
from orchard.torch.rooms import all_rooms
from orchard.torch.signature import F32_BIT

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAMES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
         "bool": torch.bool, "i64": torch.int64, "i32": torch.int32}
ROOMS = {room.__name__.rsplit(".", 1)[1]: room for room in all_rooms()}
OPERATIONS = {found.name: found for room in ROOMS.values() for found in vars(room).values()
              if isinstance(found, Operation)}
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_there_are_rooms():
    assert ROOMS and OPERATIONS and all(room.__all__ for room in ROOMS.values())


# ---- Calls of the C tests ------------------------------------------------------------------------

class Case:
    """A line like "softmax_backward x=3x40 mask=3x40:bool scale=0.5 has_scale=1 dmask:f32"."""

    def __init__(self, line):
        self.op, *words = line.split()
        self.operation = OPERATIONS[self.op.rsplit("_", 1)[0]]
        self.call = getattr(self.operation, self.op.rsplit("_", 1)[1])
        self.sizes, self.options, self.outputs = {}, {}, {}
        for word in words:
            name, _, value = word.partition("=")
            sizes = re.fullmatch(r"([\dx]*)(?::(\w+))?(?:\*([\d.e+-]+))?(?:\{(.*)\})?", value)
            if not value:
                name, _, dtype = name.partition(":")
                self.outputs[name] = dtype
            elif name in self.operation.forward.inputs and sizes:
                self.sizes[name] = sizes.groups()
            elif not name.startswith("has_"):
                self.options[name] = float(value) if re.search(r"[.e]", value) else int(value)

    def inputs(self, dtype, seed=0):
        generator, made = torch.Generator().manual_seed(seed), {}
        rules = self.operation.forward.signature.operation.operands
        for name, (sizes, kind, factor, values) in self.sizes.items():
            size = [int(n) for n in sizes.split("x")] if sizes else []
            if kind is None and rules[name].dtype.startswith("bool"):
                kind = "bool"
            kind = dtype if kind in (None, "x") else NAMES[kind]
            if dtype == torch.float64 and kind == torch.float32:
                kind = dtype
            x = torch.rand(size, generator=generator, dtype=torch.float64) * 4 - 2
            if values:
                x = torch.tensor([float(n) for n in values.split(",")]).double().view(size)
            made[name] = x > -1 if kind == torch.bool else (x * float(factor or 1)).to(kind)
        return made

    def arguments(self, dtype):
        """Of the op's schema: for backward after the forward's formula in float64."""
        given = {**self.inputs(dtype), **self.options}
        forward = self.operation.forward
        optional = [x.name for x in forward.signature.outputs if x.optional]
        if self.call is forward:
            wanted = [x for x in self.outputs if x in optional]
            return self.call.args(forward.bits(wanted) | forward.signature.required, given)
        exact = forward.args(0xFFFF, {name: wide(x) for name, x in given.items()})
        like = forward.signature.shapes(*forward.signature.named(forward.args(0xFFFF, given))[:2],
                                        0xFFFF)
        made = {name: x if x is None else x.to(shape[1]) for name, x, shape in
                zip(forward.outputs, forward.by_formula(*exact), like)}
        known = {**given, **made}
        present = [x for x in forward.inputs if given.get(x) is not None]
        sources = {x: self.operation._source(x, given) for x in self.operation.saved}
        given.update({x: known.get(source) for x, source in sources.items()})
        generator = torch.Generator().manual_seed(5)
        for dx, x in self.operation.cotangents.items():
            wanted = x in self.outputs or dx in self.outputs or not self.call.signature.operation \
                .operands[dx].optional
            if made[x] is not None and wanted:
                given[dx] = torch.randn(made[x].shape, generator=generator,
                                        dtype=torch.float64).to(made[x].dtype)
        asked = [x for x in self.outputs if x in self.call.outputs]
        asked = asked or [self.operation.gradients[x] for x in present
                          if x in self.operation.gradients and given[x].is_floating_point()]
        bits = self.call.signature.required | self.call.bits(set(asked))
        if dtype in (torch.float16, torch.bfloat16):
            bits |= self.call.bits([x for x in asked if self.outputs.get(x) == "f32"]) << F32_BIT
        return self.call.args(bits, given)


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def lines():
    for room in ROOMS:
        for line in (ROOT / "src" / room / f"{room}_cases.txt").read_text().splitlines():
            if line and not line.startswith(("#", "bench", "wrong")):
                yield re.sub(r"@\w+", "", line)  # torch has fresh outputs


LINES = list(dict.fromkeys(lines()))


def exact(case, args):
    """The formula in float64, of the very numbers that the call gets."""
    return case.call.by_formula(*(wide(x) for x in args))


def largest_error(found, right):
    """(the error, the largest element); NaN and infinities must agree."""
    found, right = found.double(), right.double()
    finite = right.isfinite()
    torch.testing.assert_close(found[~finite], right[~finite], equal_nan=True)
    return float((found - right)[finite].abs().max()), float(right[finite].abs().max())


def check_values(case, args, made, dtype):
    names = case.call.outputs
    for name, output, found, right in zip(names, case.call.signature.outputs, made,
                                          exact(case, args)):
        if right is None or not (args[0] | case.call.signature.required) >> names.index(name) & 1:
            assert found is None or found.numel() == 0, name
            continue
        assert found.shape == right.shape, name
        if found.numel() and right.isfinite().any():
            error, largest = largest_error(found, right)
            bound = torch.finfo(found.dtype).eps * (output.ulps or 8) * max(largest, 1e-30)
            assert error <= bound, f"{name}: {error} of {largest}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", LINES)
def test_values_of_the_ops(line, dtype):
    case = Case(line)
    args = case.arguments(dtype)
    made = case.call(*args)
    check_values(case, args, made, dtype)
    again = cpu.in_python(case.call.signature)(*args)
    again = again if isinstance(again, tuple) else (again,)
    for one, other in zip(made, again):  # kernel.c and its twin
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def permuted(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(x):
    return torch.stack((x, x), -1)[..., 1]


def gaps(x):
    whole = x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)
    whole[..., 3:-2] = x
    return whole[..., 3:-2]


def expanded(x):
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("layout", [permuted, every_second, gaps, expanded])
@pytest.mark.parametrize("line", LINES)
def test_any_strides(line, layout):
    case = Case(line)
    args = case.arguments(torch.float32)
    laid = [layout(x) if isinstance(x, torch.Tensor) and x.dim() and x.numel() else x for x in args]
    dense = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in laid]
    for one, other in zip(case.call(*laid), case.call(*dense)):
        assert one.is_contiguous() and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("line", LINES)
def test_fakes_are_what_kernels_return(line):
    case = Case(line)
    for dtype in (torch.float32, torch.bfloat16):
        args = case.arguments(dtype)
        with FakeTensorMode() as mode:
            fakes = case.call(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                                for x in args))
        for fake, real in zip(fakes, case.call(*args)):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
        assert [x.shape for x in case.call(*meta)] == [x.shape for x in case.call(*args)]


# Rows without columns may give NaN, which torch's check calls different from NaN.
@pytest.mark.parametrize("line", [x for x in LINES if not re.search(r"[=x]0\b", x)][::4])
def test_opcheck(line):
    case = Case(line)
    torch.library.opcheck(case.call.op, case.arguments(torch.float32))
    if case.call is case.operation.forward:
        args = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in case.arguments(torch.float64)]
        operands = case.call.signature.named(args)[0]
        saved = {case.operation._source(x, operands) for x in case.operation.saved}
        args[0] |= case.call.bits([x for x in case.call.outputs if x in saved])
        torch.library.opcheck(case.operation.op, args)


# ---- MPS: the library's Metal kernels on the fake of torch.mps -----------------------------------

@contextlib.contextmanager
def metal():
    if not sys.platform.startswith("linux"):
        pytest.skip("PoCL is for Linux")
    import fake_mps

    fake_mps.install()
    yield fake_mps.tensor


def counted(call):
    return [(x.backend, x.reason) for x in mps.report() if x.op == call.name]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_values_on_mps(line, dtype, monkeypatch):
    case = Case(line)
    with metal() as place:
        monkeypatch.setattr(mps, "launcher", mps.Launcher())
        args = case.arguments(dtype)
        on_mps = [place(x) if isinstance(x, torch.Tensor) else x for x in args]
        made = case.call(*on_mps)
        assert all(x.is_mps for x in made)
        check_values(case, args, [x.cpu() for x in made], dtype)
        assert counted(case.call) == [("mps", None)]


@pytest.mark.parametrize("below", [False, True], ids=["", "below autograd"])
@pytest.mark.parametrize("line", {line.split()[0]: line for line in reversed(LINES)}.values())
def test_what_mps_refuses_is_the_formula(line, below, monkeypatch):
    """Also where the switch calls: torch records nothing there."""
    case = Case(line)
    with metal() as place:
        monkeypatch.setattr(mps, "launcher", mps.Launcher())
        args = case.arguments(torch.float64)  # which Metal has not
        on_mps = [place(x) if isinstance(x, torch.Tensor) else x for x in args]
        with torch._C._AutoDispatchBelowAutograd() if below else contextlib.nullcontext():
            made = case.call(*on_mps)
        check_values(case, args, [x.cpu() for x in made], torch.float64)
        assert [backend for backend, _ in counted(case.call)] == ["mps", "pytorch"]
        monkeypatch.setenv("ORCHARD_STRICT", "1")
        with pytest.raises(orchard.UnsupportedError, match="strict forbids a fallback"):
            case.call(*on_mps)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_backward_without_a_formula_is_the_derivative_of_forward(name):
    """Where backward gets all of forward's inputs."""
    operation = OPERATIONS[name]
    if set(operation.gradients) <= set(operation.backward.inputs):
        for line in LINES:
            case = Case(line)
            if case.operation is operation and case.call is operation.backward:
                args = case.arguments(torch.float64)
                operands, options, _ = case.call.signature.named(args)
                full = {**dict.fromkeys(case.call.options), **operands, **options}
                made = operation._derived(**{x: y for x, y in full.items() if x[:4] != "has_"})
                for found, right in zip(made, case.call.by_formula(*args)):
                    if found is not None and right is not None:
                        torch.testing.assert_close(found, right)


# ---- Functions beside torch's --------------------------------------------------------------------

def draw(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def samples(dtype=torch.float64):
    for room in ROOMS.values():
        yield from room.samples(draw(dtype))


COUNT = len(list(samples()))
each = pytest.mark.parametrize("n", range(COUNT))


def sample(n, dtype=torch.float64):
    ours, theirs, tensors, options = next(itertools.islice(samples(dtype), n, None))
    return (lambda *x: ours(*x, **options)), (lambda *x: theirs(*x, **options)), tensors


def outputs(made):
    return made if isinstance(made, tuple) else (made,)


def differentiate(function, tensors, dtype=None):
    """Outputs and gradients."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    made = outputs(function(*leaves))
    generator = torch.Generator().manual_seed(7)
    douts = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
             for x in made]
    if dtype is not None:  # what the call in 16 bits gets
        douts = [d.to(tensors[0].dtype).to(dtype) for d in douts]
    return [x.detach() for x in made] + list(torch.autograd.grad(made, leaves, douts))


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_at_most_twice_torchs(n, dtype):
    ours, theirs, tensors = sample(n, dtype)
    right = differentiate(theirs, tensors, torch.float64)
    for mine, other, exact in zip(differentiate(ours, tensors), differentiate(theirs, tensors),
                                  right):
        assert mine.shape == exact.shape and mine.dtype == other.dtype
        if exact.numel():
            error = (mine.double() - exact).abs().max()
            bar = (other.double() - exact).abs().max()
            assert error <= 2 * bar + 4 * torch.finfo(dtype).eps * exact.abs().max()


@each
def test_derivatives_of_both_orders_and_modes(n):
    ours, _, tensors = sample(n)
    leaves = [x[..., :7].clone().requires_grad_() if x.dim() and x.shape[-1] > 7 else
              x.clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, check_batched_grad=True,
                                    check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(ours, leaves, check_batched_grad=True)


@each
def test_compiled(n):
    ours, _, tensors = sample(n, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=bool(n % 2))
    for mine, other in zip(differentiate(compiled, tensors), differentiate(ours, tensors)):
        assert torch.equal(mine, other)


@each
def test_vmap_jvp_and_their_compositions(n):
    ours, theirs, tensors = sample(n)
    many = [torch.stack([x, x + 0.5, x * 2]) for x in tensors]
    for dims in itertools.product((0, None), repeat=len(tensors)):
        if any(d == 0 for d in dims):
            given = [x if d == 0 else one for x, one, d in zip(many, tensors, dims)]
            for one, other in zip(outputs(torch.func.vmap(ours, dims)(*given)),
                                  outputs(torch.func.vmap(theirs, dims)(*given))):
                torch.testing.assert_close(one, other)
    change = [torch.cos(x) for x in tensors]
    torch.testing.assert_close(torch.func.jvp(ours, tuple(tensors), tuple(change)),
                               torch.func.jvp(theirs, tuple(tensors), tuple(change)))

    def loss(function):
        return lambda *x: sum((y * y.cos()).sum() for y in outputs(function(*x)))

    places = tuple(range(len(tensors)))
    for given, transform in ((tensors, lambda f: torch.func.grad(f, places)),
                             (many, lambda f: torch.func.vmap(torch.func.grad(f, places)))):
        torch.testing.assert_close(transform(loss(ours))(*given), transform(loss(theirs))(*given))
    if 0 < sum(x.numel() for x in tensors) < 60:
        torch.testing.assert_close(torch.func.hessian(loss(ours), places)(*tensors),
                                   torch.func.hessian(loss(theirs), places)(*tensors))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, c) for x, c in zip(tensors, change)]
        for one, other in zip(outputs(ours(*duals)), outputs(theirs(*duals))):
            torch.testing.assert_close(forward_ad.unpack_dual(one).tangent,
                                       forward_ad.unpack_dual(other).tangent)


@each
def test_autocast_is_as_torchs(n):
    ours, theirs, tensors = sample(n, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, other = outputs(ours(*tensors)), outputs(theirs(*tensors))
    assert [x.dtype for x in mine] == [x.dtype for x in other]
    for one, two in zip(mine, other):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


@each
def test_no_grad_inference_mode_and_threads(n):
    ours, _, tensors = sample(n, torch.float32)
    right = outputs(ours(*tensors))
    results = []
    with torch.inference_mode():
        results.append(outputs(ours(*tensors)))
    with torch.no_grad():
        results.append(outputs(ours(*(x.clone().requires_grad_() for x in tensors))))
    thread = threading.Thread(target=lambda: results.append(outputs(ours(*tensors))))
    thread.start()
    thread.join(60)
    assert len(results) == 3
    for made in results:
        for one, other in zip(made, right):
            assert torch.equal(one, other) and not one.requires_grad


@each
def test_only_some_gradients(n):
    ours, theirs, tensors = sample(n)
    for which in range(1, 2 ** len(tensors)):
        found = []
        for function in (ours, theirs):
            leaves = [x.clone().requires_grad_(bool(which >> i & 1)) for i, x in enumerate(tensors)]
            wanted = [x for x in leaves if x.requires_grad]
            made = [x for x in outputs(function(*leaves)) if x.requires_grad]
            found.append(torch.autograd.grad([x.sin().sum() for x in made], wanted))
        torch.testing.assert_close(*found)


def test_exported_programs_keep_the_op_and_its_gradient():
    ours, _, tensors = sample(0, torch.float32)

    class Model(torch.nn.Module):
        def forward(self, x):
            return ours(x)

    program = torch.export.export(Model(), (tensors[0],))
    assert "torch.ops.orchard." in program.graph_module.code
    x = tensors[0].clone().requires_grad_()
    made, right = program.module()(x), ours(x)
    assert torch.equal(made, right)
    for one, other in zip(torch.autograd.grad(made.sin().sum(), x),
                          torch.autograd.grad(right.sin().sum(), x)):
        assert torch.equal(one, other)


def test_checkpoints_and_saved_tensors_on_hooks():
    ours, _, tensors = sample(0, torch.float32)
    right = differentiate(ours, tensors)
    made = differentiate(lambda *x: checkpoint(ours, *x, use_reentrant=False), tensors)
    assert all(map(torch.equal, made, right))
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, differentiate(ours, tensors), right))


def test_a_change_in_place_of_what_backward_needs_is_noticed():
    ours, _, tensors = sample(0, torch.float32)
    x = tensors[0].clone().requires_grad_()
    made = ours(x)
    with torch.no_grad():  # one of them is what backward needs
        made.add_(1)
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


# ---- Misuse --------------------------------------------------------------------------------------

def functions():
    return [pytest.param(found, id=name) for room in ROOMS.values()
            for name, found in ((name, getattr(room, name)) for name in room.__all__)
            if not isinstance(found, type)]


@pytest.mark.parametrize("function", functions())
@pytest.mark.parametrize("bad,error,message", [
    (lambda: [1.0, 2.0], orchard.ArgumentError, "is a list, must be a tensor"),
    (lambda: torch.randn(3, 4).to_sparse(), orchard.UnsupportedError, "layout torch.sparse_coo"),
    (lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
     orchard.UnsupportedError, "is a nested tensor"),
    (lambda: torch.arange(12).view(3, 4), orchard.DtypeError, "is i64, must be"),
    (lambda: torch.randn((1,) * 8 + (4,)), orchard.ShapeError, "has rank 9, the limit is 8"),
    (lambda: torch.randn(3, 4, dtype=torch.complex64), orchard.DtypeError, "does not know"),
])
def test_misuse(function, bad, error, message):
    given, heard = bad(), []
    for arguments in ((given, -1), (given, (4,)), (given, given), (given,)):
        try:
            function(*arguments)
        except (TypeError, orchard.OrchardError) as why:
            if isinstance(why, error) and re.search(message, str(why)):
                return
            heard.append(why)  # perhaps of an argument that this function takes otherwise
    pytest.fail(f"heard {heard}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_missing_and_misplaced_operands(name):
    operation = OPERATIONS[name]
    first = operation.forward.signature.first
    with pytest.raises(orchard.ArgumentError, match=f"{first} is a NoneType, must be a tensor"):
        operation()
    x = torch.randn(3, 4)
    others = {other: torch.randn(3, 4, device="meta") for other in operation.forward.inputs
              if other != first}
    if others:
        with pytest.raises(orchard.ArgumentError, match=f"is on meta, {first} is on cpu"):
            operation(**{first: x}, **others)


# ---- Modules, and training in several processes --------------------------------------------------

def modules():
    return [pytest.param(getattr(orchard.torch.nn, name), id=name)
            for name in orchard.torch.nn.__all__]


@pytest.mark.parametrize("module", modules())
def test_modules_are_torchs(module):
    parent = next(x for x in module.__mro__[1:] if x.__module__.startswith("torch.nn"))
    if parent is torch.nn.Module:
        return
    arguments = {"dim": -1} if "dim" in parent.__init__.__annotations__ else {}
    if "normalized_shape" in parent.__init__.__annotations__:
        arguments = {"normalized_shape": 8}
    x = torch.randn(3, 8)
    mine, theirs = module(**arguments), parent(**arguments)
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(mine(x), theirs(x))


def _rank(rank, port, results):
    import os

    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    inner = [one for one in range(COUNT) if len(sample(one)[2]) == 1]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = model

        def forward(self, x):
            return sum(y.float().sin().sum() for y in outputs(sample(inner[0])[0](self.linear(x))))

    wrapped = torch.nn.parallel.DistributedDataParallel(Model())
    torch.manual_seed(rank + 1)
    wrapped(torch.randn(6, 4)).backward()
    results.put((rank, model.weight.grad.tolist()))
    dist.destroy_process_group()


def test_two_processes_have_the_same_gradients():
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = mp.get_context("spawn")
    results = spawn.Queue()
    ranks = [spawn.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for one in ranks:
        one.start()
    found = dict(results.get(timeout=240) for _ in ranks)
    for one in ranks:
        one.join(60)
    assert found[0] == found[1] and any(map(any, found[0]))


# ---- In place of torch's own ---------------------------------------------------------------------

def replacements():
    return [pytest.param(one, id=one.op) for room in ROOMS.values()
            for one in getattr(room, "REPLACES", ())]


@pytest.mark.parametrize("one", replacements())
def test_replacements_name_operations_of_torch(one):
    space, name = one.op.split("::")
    packet = getattr(getattr(torch.ops, space), name.split(".")[0])
    overload = getattr(packet, name.split(".")[1] if "." in name else "default")
    assert callable(one.run) and overload._schema is not None
