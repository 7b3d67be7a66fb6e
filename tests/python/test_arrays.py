"""How arrays of other libraries are read and made: buffer protocol, DLPack, results, refusals."""
import array
import ctypes
import gc
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import orchard
import pytest
import torch
from orchard import _buffers, _dlpack, _structs
from orchard.arrays import Array, Operands, empty_like_kind, export

RNG = np.random.default_rng(11)


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def described(x):
    with Operands("test") as operands:
        found = operands.hold("x", x)
        return found.dtype, found.shape, found.strides, found.address, found.read_only


def test_importing_orchard_imports_neither_torch_nor_numpy():
    code = ("import sys, orchard, array; a = array.array('f', range(6)); "
            "m = memoryview(a).cast('B').cast('f', [1, 1, 3, 2]);"
            "orchard.attention_forward(m, m, m);"
            "print([n for n in ('torch', 'numpy', 'transformers') if n in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""


# ---- Buffer protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize("numpy_name, dtype", [
    ("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("int64", "I64"), ("int32", "I32"),
    ("int16", "I16"), ("int8", "I8"), ("uint8", "U8"), ("bool", "BOOL"), ("longlong", "I64")])
def test_dtypes_of_numpy(numpy_name, dtype):
    x = np.zeros((2, 3), numpy_name)
    assert described(x) == (getattr(_structs, dtype), (2, 3), (3, 1), x.ctypes.data, False)


@pytest.mark.parametrize("numpy_name", ["uint32", "uint64", "complex64", "longdouble", "S4"])
def test_dtypes_that_nobody_takes(numpy_name):
    with pytest.raises(orchard.DtypeError, match="test: x has elements of format"):
        export("test", "x", np.zeros((2, 3), numpy_name))


def test_dates_have_no_buffer():
    with pytest.raises(orchard.ArgumentError, match="x cannot be read"):
        export("test", "x", np.zeros(3, "datetime64[s]"))


def test_strides_are_read_not_copied():
    x = np.zeros((4, 6, 8), np.float32)
    view = x[1:, ::2, 3:5].transpose(2, 0, 1)
    assert described(view) == (_structs.F32, (2, 3, 3), (1, 48, 16), view.ctypes.data, False)
    repeated = np.broadcast_to(np.float32(1), (3, 4))
    assert described(repeated)[2] == (0, 0) and described(repeated)[4]


def test_scalars_and_empty_arrays():
    assert described(np.array(1.5))[:3] == (_structs.F64, (), ())
    assert described(np.zeros((2, 0, 3)))[:2] == (_structs.F64, (2, 0, 3))
    assert described(np.float32(2))[:2] == (_structs.F32, ())


def test_big_endian_is_refused():
    with pytest.raises(orchard.DtypeError, match="x is big-endian"):
        export("test", "x", np.zeros(3, ">f4"))
    assert described(np.zeros(3, ">i1"))[0] == _structs.I8  # one byte has no order


def test_a_stride_between_elements_is_refused():
    record = np.zeros(4, np.dtype([("a", "f4"), ("b", "i1"), ("c", "i1")]))
    with pytest.raises(orchard.LayoutError, match="stride of 6 bytes in dimension 0.*4-byte"):
        export("test", "x", record["a"])
    assert described(record["b"])[2] == (6,)


def test_negative_strides_get_c_s_message():
    q = numbers(1, 2, 3, 4)
    with pytest.raises(orchard.LayoutError, match="_forward: q has stride -4 in dimension"):
        orchard.attention_forward(q[:, :, ::-1], q, q)
    one = numbers(1, 1, 1, 4)[:, :, ::-1]  # of one element: no direction, no objection
    out, _ = orchard.attention_forward(one, one, one)
    assert np.array_equal(out, one)


def test_too_many_dimensions():
    q = numbers(1, 1, 2, 2)
    for name in ("q", "k", "v", "out", "lse", "bias", "mask", "alibi", "sinks", "key_lengths"):
        dtype = {"mask": "?", "key_lengths": "i4"}.get(name, "f4")
        call = {"q": q, "k": q, "v": q, name: np.zeros((1,) * 9, dtype)}
        with pytest.raises(orchard.ShapeError, match=f"{name} has rank 9, (the limit is 8|must)"):
            orchard.attention_forward(**call)


def test_read_only_inputs_are_fine_and_outputs_are_not():
    q = numbers(1, 2, 3, 4)
    expected, lse = orchard.attention_forward(q, q, q)
    q.flags.writeable = False
    out, _ = orchard.attention_forward(q, q, q)
    assert np.array_equal(out, expected)
    for name in ("out", "lse"):
        target = {"out": np.zeros_like(q), "lse": np.zeros_like(lse)}
        target[name].flags.writeable = False
        with pytest.raises(orchard.LayoutError, match=f"{name} is read-only"):
            orchard.attention_forward(q, q, q, **target)
        assert not target[name].any()
    with pytest.raises(orchard.LayoutError, match="dk is read-only"):
        locked = np.zeros_like(q)
        locked.flags.writeable = False
        orchard.attention_backward(expected, q, q, q, expected, lse, dk=locked)


def test_plain_python_buffers():
    values = [float(x) for x in numbers(24).astype(np.float32)]
    flat = array.array("f", values)
    q = np.array(values, np.float32).reshape(1, 2, 3, 4)
    expected, expected_lse = orchard.attention_forward(q, q, q)
    kinds = {
        "memoryview": memoryview(flat).cast("B").cast("f", [1, 2, 3, 4]),
        "bytes": memoryview(flat.tobytes()).cast("f", [1, 2, 3, 4]),
        "ctypes": (ctypes.c_float * 4 * 3 * 2 * 1).from_buffer(flat),
    }
    for kind, x in kinds.items():
        out, lse = orchard.attention_forward(x, x, x)
        assert isinstance(out, Array) and out.shape == (1, 2, 3, 4) and out.dtype == "f32", kind
        assert np.array_equal(np.from_dlpack(out), expected)
        assert out.tolist() == expected.tolist() and lse.tolist() == expected_lse.tolist()
        target = memoryview(bytearray(96)).cast("f", [1, 2, 3, 4])
        again, _ = orchard.attention_forward(x, x, x, out=target)
        assert again is target and target.tolist() == expected.tolist()
    with pytest.raises(orchard.LayoutError, match="out is read-only"):
        orchard.attention_forward(q, q, q, out=memoryview(bytes(96)).cast("f", [1, 2, 3, 4]))


def test_buffers_are_given_back():
    block = bytearray(96)
    x = memoryview(block).cast("f", [1, 2, 3, 4])
    orchard.attention_forward(x, x, x)
    # Kept errors keep their calls' frames: nothing is given back by the frames' end.
    with pytest.raises(orchard.ShapeError) as by_c:
        orchard.attention_forward(x, x, np.zeros((1, 2, 5, 4), np.float32))
    with pytest.raises(orchard.LayoutError) as before_c:
        orchard.attention_forward(x, x, x, out=memoryview(bytes(96)).cast("f", [1, 2, 3, 4]))
    x.release()
    block.append(1)  # raises BufferError while anybody holds it
    assert by_c.tb and before_c.tb
    q = numbers(1, 2, 3, 4)
    before = sys.getrefcount(q)
    for _ in range(100):
        orchard.attention_forward(q, q, q)
    gc.collect()
    assert sys.getrefcount(q) == before


def test_things_that_are_no_arrays():
    q = numbers(1, 1, 2, 2)
    for thing, words in ((3, "q is an int"), ([1.0], "q is a list"), ("text", "q is a str"),
                         (object(), "q is an object")):
        with pytest.raises(orchard.ArgumentError, match=words + ", which has neither DLPack nor"):
            orchard.attention_forward(thing, q, q)
    with pytest.raises(orchard.ArgumentError, match="attention_forward: k is missing"):
        orchard.attention_forward(q, None, q)
    with pytest.raises(orchard.DtypeError, match="q is u8, must be f64"):
        orchard.attention_forward(memoryview(b"abcd").cast("B", [1, 1, 2, 2]), q, q)


# ---- DLPack --------------------------------------------------------------------------------------


NEW_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                                ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class Exporter:
    """A DLPack producer written with ctypes that counts calls of its deleter."""

    def __init__(self, values, versioned=True, **changes):
        self.values = np.ascontiguousarray(values)
        self.deleted, self.versioned, self.changes = 0, versioned, changes
        self.device = (1, 0)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.changes.get("old") and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        kind = _dlpack.DLManagedTensorVersioned if self.versioned else _dlpack.DLManagedTensor
        self.managed = kind()
        rank = self.values.ndim
        self.shape = (ctypes.c_int64 * rank)(*self.values.shape)
        self.strides = (ctypes.c_int64 * rank)(
            *(n // self.values.itemsize for n in self.values.strides))
        code = {"f": 2, "i": 0, "u": 1, "b": 6}[self.values.dtype.kind]
        tensor = _dlpack.DLTensor(
            data=self.values.ctypes.data - self.changes.get("byte_offset", 0),
            device_type=self.changes.get("inner_device", 1), ndim=rank,
            code=self.changes.get("code", code), bits=self.values.itemsize * 8,
            lanes=self.changes.get("lanes", 1), shape=self.shape,
            byte_offset=self.changes.get("byte_offset", 0))
        if not self.changes.get("no_strides"):
            tensor.strides = self.strides
        self.managed.tensor = tensor
        self.managed.deleter = ctypes.cast(self.deleter(), ctypes.c_void_p).value
        if self.versioned:
            self.managed.major = self.changes.get("major", 1)
            self.managed.flags = self.changes.get("flags", 0)
        self.name = _dlpack.VERSIONED if self.versioned else _dlpack.PLAIN
        return NEW_CAPSULE(ctypes.addressof(self.managed), self.name, self.destructor())

    def destructor(self):
        """Calls the deleter, as an exporter's must for a capsule that nobody renamed."""
        @ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        def end(capsule):
            self.count(ctypes.addressof(self.managed))
        self.end = end
        return ctypes.cast(end, ctypes.c_void_p)

    def deleter(self):
        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def count(address):
            assert address == ctypes.addressof(self.managed)
            self.deleted += 1
        self.count = count
        return count


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("changes", [{}, {"no_strides": True}, {"byte_offset": 64}, {"old": True}])
def test_dlpack_is_read_and_given_back_once(versioned, changes):
    q = numbers(1, 2, 3, 4)
    expected, _ = orchard.attention_forward(q, q, q)
    x = Exporter(q, versioned, **changes)
    out, _ = orchard.attention_forward(x, q, q)
    assert x.deleted == 1
    assert isinstance(out, Array) and np.array_equal(np.from_dlpack(out), expected)
    with pytest.raises(orchard.ShapeError) as by_c:  # given back as well, though the error is kept
        orchard.attention_forward(x, q, numbers(1, 2, 5, 4))
    assert x.deleted == 2 and by_c.tb
    with pytest.raises(orchard.ArgumentError) as before_c:
        orchard.attention_forward(x, q, q, window="no")
    assert x.deleted == 3 and before_c.tb


@pytest.mark.parametrize("changes, error, words", [
    ({"code": 5}, orchard.DtypeError, r"x has DLPack type \(code 5, 32 bits, 1 lanes\)"),
    ({"lanes": 4}, orchard.DtypeError, "4 lanes"),
    ({"inner_device": 2}, orchard.DeviceError, "x is on cuda:0, only memory of the CPU"),
    ({"major": 2}, orchard.ArgumentError, "x comes as DLPack 2.0, versions 0 and 1 are known")])
def test_dlpack_that_is_refused_is_given_back_once(changes, error, words):
    x = Exporter(numbers(2, 3), **changes)
    with pytest.raises(error, match=words):
        export("test", "x", x)
    gc.collect()  # the error knew where it came from
    assert x.deleted == 1


def test_other_devices_are_refused_before_anything_is_exported():
    for kind, name in ((2, "cuda"), (8, "metal"), (77, "DLPack device 77")):
        x = Exporter(numbers(2, 3))
        x.device = (kind, 1)
        with pytest.raises(orchard.DeviceError, match=f"q is on {name}:1, only memory of the CPU"):
            orchard.attention_forward(x, x, x)
        assert x.deleted == 0


def test_read_only_and_copied_memory_is_no_output():
    q = numbers(1, 2, 3, 4)
    for flags, words in ((1, "out is read-only"), (2, "out was copied by its exporter")):
        x = Exporter(np.zeros_like(q), flags=flags)
        orchard.attention_forward(Exporter(q, flags=flags), q, q)  # as an input it is fine
        with pytest.raises(orchard.LayoutError, match=words):
            orchard.attention_forward(q, q, q, out=x)
        assert x.deleted == 1 and not x.values.any()
    x = Exporter(np.zeros_like(q))
    out, _ = orchard.attention_forward(q, q, q, out=x)
    assert out is x and np.array_equal(x.values, orchard.attention_forward(q, q, q)[0])


def test_capsules_that_are_none():
    class Liar:
        def __dlpack__(self, **_):
            return self.what

    x = Liar()
    x.what = 5
    with pytest.raises(orchard.ArgumentError, match="__dlpack__ gave int, not a DLPack capsule"):
        export("test", "x", x)
    used = torch.zeros(3).__dlpack__()
    torch.from_dlpack(used)
    x.what = used
    with pytest.raises(orchard.ArgumentError, match="not a DLPack capsule that nobody has used"):
        export("test", "x", x)

    class Broken:
        def __dlpack__(self, **_):
            raise RuntimeError("not today")

    with pytest.raises(orchard.ArgumentError, match="x cannot be read through DLPack: not today"):
        export("test", "x", Broken())


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_torch_tensors_in_and_out(name):
    dtype = getattr(torch, name)
    q = torch.randn(2, 3, 5, 8, generator=torch.manual_seed(1)).to(dtype)
    out, lse = orchard.attention_forward(q.transpose(1, 2).contiguous().transpose(1, 2), q, q)
    assert out.dtype == dtype and out.shape == q.shape and out.device.type == "cpu"
    assert lse.dtype == (torch.float64 if name == "float64" else torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double())
    bound = {"bfloat16": 2e-2, "float16": 2e-3}.get(name, 1e-6)
    assert torch.allclose(out.double(), expected, atol=bound)
    assert torch.equal(out, orchard.attention_forward(q, q, q)[0])


def test_torch_tensors_that_are_refused():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(orchard.ArgumentError, match="q is a torch tensor that requires grad"):
        orchard.attention_forward(q.clone().requires_grad_(), q, q)
    with pytest.raises(orchard.OrchardError, match="k "):
        orchard.attention_forward(q, q.to("meta"), q)
    with pytest.raises(orchard.ArgumentError, match="v cannot be read through DLPack"):
        orchard.attention_forward(q, q, q.to_sparse())
    with pytest.raises(orchard.LayoutError, match=r"q is a negated view.*q.resolve_neg\(\)"):
        orchard.attention_forward(torch._neg_view(q), q, q)
    for name in ("k", "mask", "out", "lse"):
        given = dict(q=q, k=q, v=q, mask=torch.ones(1, 1, 3, 3).bool(), out=q + 1, lse=q[..., 0] + 1)
        cut = given[name] = given[name].clone()
        needed = cut.untyped_storage().nbytes()
        for there in (0, needed - 1):
            cut.untyped_storage().resize_(there)
            with pytest.raises(orchard.ArgumentError, match=f"{name} needs {needed} bytes of its "
                                                            f"storage, which has {there}"):
                orchard.attention_forward(**given)


def test_torch_memory_is_shared_not_copied():
    q, out = torch.randn(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    given, lse = orchard.attention_forward(q, q, q, out=out)
    assert given is out and torch.equal(out, orchard.attention_forward(q, q, q)[0])


# ---- Results -------------------------------------------------------------------------------------


def test_results_are_of_the_caller_s_kind():
    n, t = numbers(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    assert type(orchard.attention_forward(n, n, n)[0]) is np.ndarray
    assert type(orchard.attention_forward(t, n, n)[0]) is torch.Tensor
    assert type(orchard.attention_forward(memoryview(n), t, t)[0]) is Array
    out, lse = orchard.attention_forward(n, n, n)
    grads = orchard.attention_backward(out, n, t, memoryview(n), out, lse)
    assert [type(x) for x in grads[:3]] == [np.ndarray, torch.Tensor, Array]


def test_ml_dtypes_bfloat16_in_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = numbers(1, 2, 3, 4).astype(ml_dtypes.bfloat16)
    out, lse = orchard.attention_forward(q, q, q)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    t = torch.from_numpy(q.view(np.int16)).view(torch.bfloat16)
    same, _ = orchard.attention_forward(t, t, t)
    assert np.array_equal(out.view(np.int16), same.view(torch.int16).numpy())
    view = q.transpose(0, 2, 1, 3)
    assert described(view)[:3] == (_structs.BF16, (1, 3, 2, 4), (24, 4, 12, 1))
    q.flags.writeable = False
    assert described(q)[4]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8",
                                   "BOOL"])
def test_our_own_array_reaches_torch_and_numpy(dtype):
    code = getattr(_structs, dtype)
    x = empty_like_kind(None, (2, 3), code)
    assert x.dtype == dtype.lower() and repr(x) == f"orchard.Array([2, 3], {x.dtype})"
    tensor = torch.from_dlpack(x)
    tensor.fill_(1)
    assert tensor.shape == (2, 3) and described(x)[3] == tensor.data_ptr()
    assert described(tensor)[0] == code and described(x)[:3] == (code, (2, 3), (3, 1))
    bits = {"F16": 0x3C00, "BF16": 0x3F80}.get(dtype, 1)
    assert x.tolist() == [[bits] * 3] * 2
    if dtype != "BF16":
        assert np.from_dlpack(x).tolist() == [[1] * 3] * 2
    if sys.version_info >= (3, 12) and dtype not in ("F16", "BF16"):
        assert memoryview(x).shape == (2, 3)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8",
                                   "BOOL"])
def test_numpy_asarray_of_our_own_array_is_its_memory(dtype):
    pytest.importorskip("ml_dtypes")  # bf16
    x = Array((2, 3), getattr(_structs, dtype))
    seen = np.asarray(x)
    seen[:] = 1
    assert seen.shape == (2, 3) and described(x)[:4] == described(seen)[:4]
    assert np.array(x).ctypes.data != seen.ctypes.data == np.asarray(x).ctypes.data
    assert np.asarray(x, dtype="float64").tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="copy"):
        np.asarray(x, dtype="complex64", copy=False)
    del x
    gc.collect()
    assert seen.tolist() == [[1] * 3] * 2
    assert np.asarray(Array((2, 0), getattr(_structs, dtype))).shape == (2, 0)


def test_numpy_without_bfloat16_is_told_so():
    code = ("import numpy, orchard; from orchard import _structs\n"
            "numpy.asarray(orchard.Array((2,), _structs.BF16))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TypeError: orchard.Array: NumPy has bf16 only after `import ml_dtypes`" in done.stderr


def test_our_own_array_outlives_and_dies_as_it_should():
    x = Array((4,), _structs.F32)
    memory = weakref.ref(x._memory)
    seen = np.from_dlpack(x)
    capsule = x.__dlpack__()
    versioned = x.__dlpack__(max_version=(1, 0))
    del x, versioned
    gc.collect()
    assert memory() is not None
    seen[:] = 3
    del seen
    gc.collect()
    assert memory() is not None
    del capsule  # nobody took it
    assert memory() is None
    with pytest.raises(BufferError, match="neither copied nor moved"):
        Array((1,), _structs.F32).__dlpack__(copy=True)


@pytest.mark.parametrize("take", [np.from_dlpack, torch.from_dlpack])
def test_memory_given_back_while_an_exception_is_on_its_way(take):
    """What a failing C function holds, the interpreter drops before anybody handles the failure."""
    x = Array((4,), _structs.F32)
    memory = weakref.ref(x._memory)
    with pytest.raises((ValueError, RuntimeError), match="ambiguous"):
        sorted([take(x), 3, take(x)])
    del x
    gc.collect()
    assert memory() is None


def test_bfloat16_that_numpy_does_not_take_is_its_own_error():
    x = Array((4,), _structs.BF16)
    memory = weakref.ref(x._memory)
    with pytest.raises((RuntimeError, BufferError), match="(?i)dtype"):
        np.from_dlpack(x)
    del x
    gc.collect()
    assert memory() is None


WITHOUT = """
import sys
sys.modules["numpy"] = None
{torch}
import gc, weakref, orchard
from orchard import _structs
from orchard.arrays import Array
"""


@pytest.mark.filterwarnings("ignore")
def test_lent_without_numpy():
    code = WITHOUT.format(torch="import torch") + """
for name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"):
    x = Array((2, 3), getattr(_structs, name))
    memory = weakref.ref(x._memory)
    tensor = torch.from_dlpack(x)
    tensor.fill_(1)
    bits = {"F16": 0x3C00, "BF16": 0x3F80}.get(name, 1)
    assert x.tolist() == [[bits] * 3] * 2, name
    assert str(tensor.dtype).replace("torch.", "")[0].upper() == name[0], (tensor.dtype, name)
    del x
    assert memory() is not None
    del tensor
    gc.collect()
    assert memory() is None, name
assert torch.from_dlpack(Array((2, 0), _structs.F32)).shape == (2, 0)
assert torch.from_dlpack(Array((), _structs.F32)).shape == ()
print("done")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                          text=True)
    assert done.stdout == "done\n", done.stderr


def test_lent_with_neither_is_told_so():
    code = WITHOUT.format(torch='sys.modules["torch"] = None') + """
try:
    Array((2, 3), _structs.F32).__dlpack__()
except BufferError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == ("orchard.Array: lent through NumPy or torch, and neither can be "
                           "imported; memory() needs none\n"), done.stderr


def test_our_own_empty_and_scalar_arrays():
    for shape in ((2, 0), (0, 2), (2, 3, 0), (2, 0, 3)):
        assert Array(shape, _structs.F32).tolist() == np.empty(shape).tolist()
    assert torch.from_dlpack(Array((2, 0), _structs.F32)).shape == (2, 0)
    scalar = Array((), _structs.F64)
    scalar.memory()[()] = 2.5
    assert scalar.tolist() == 2.5 and float(np.from_dlpack(scalar)) == 2.5


def test_memory_that_is_given_back_when_the_interpreter_ends():
    code = ("import sys, torch, orchard, orchard.arrays as a, orchard._structs as s\n"
            "sys.kept = torch.from_dlpack(a.Array((3,), s.F32))\n"
            "torch.capsule = a.Array((3,), s.F32).__dlpack__()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


# ---- What would be lost without a word -----------------------------------------------------------


def test_tensors_that_are_watched_are_refused():
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx
    x = torch.randn(1, 2, 5, 8)

    def call(y):
        return orchard.attention_forward(y, y, y)[0]

    with forward_ad.dual_level():
        with pytest.raises(orchard.ArgumentError, match="q has a forward-mode derivative"):
            call(forward_ad.make_dual(x, x))
        assert torch.equal(call(x), call(x.clone()))
    with pytest.raises(orchard.ArgumentError, match="q is being traced"):
        make_fx(call)(x)
    with pytest.raises(orchard.ArgumentError, match="q is being traced"):
        torch.jit.trace(call, x, check_trace=False)


def test_torch_hears_of_outputs_that_were_written():
    """Else autograd computes gradients of values that are no longer there."""
    x, other = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8, requires_grad=True)
    out, lse, dq = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5), torch.zeros(2, 1, 2, 5, 8)

    def saved(given):
        return (other[:, :, :, 0] * given).sum() if given.dim() == 3 else (other * given).sum()

    losses = [saved(out), saved(lse), saved(dq[0])]
    orchard.explain("attention_forward", x, x, x, out=out, lse=lse)
    with pytest.raises(orchard.ShapeError):
        orchard.attention_forward(x, x[..., :4], x, out=out, lse=lse)
    torch.autograd.grad(losses[0], other, retain_graph=True)  # nothing was written yet
    orchard.attention_forward(x, x, x, out=out, lse=lse)
    orchard.attention_backward(x, x, x, x, out, lse, dq=dq[1])  # a view of the same memory
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        unrecorded = torch.zeros(1, 2, 5, 8)
    orchard.attention_forward(x, x, x, out=unrecorded)
    assert torch.equal(unrecorded, out)


def test_a_stand_in_for_torch_is_not_asked():
    code = """
import sys, unittest.mock, numpy as np, orchard
sys.modules["torch"] = unittest.mock.MagicMock()
sys.modules["torch"].__spec__ = None
q = np.ones((1, 1, 2, 2), np.float32)
print(orchard.attention_forward(q, q, q)[0].tolist(), "enable" in dir(orchard))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[[[[1.0, 1.0], [1.0, 1.0]]]] False\n", done.stderr


@pytest.mark.parametrize("torchs_file", ["__version__ = '2.1.0'", "raise OSError('no libcudart')"])
def test_help_is_there_beside_a_torch_that_cannot_be_used(torchs_file, tmp_path):
    (tmp_path / "torch.py").write_text(torchs_file)
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import inspect, orchard, pydoc\n"
            "print(*dict(inspect.getmembers(orchard))); pydoc.render_doc(orchard)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "attention_forward" in done.stdout.split() and "enable" not in done.stdout.split()


def test_masked_arrays_are_refused():
    q = numbers(1, 2, 3, 4)
    with pytest.raises(orchard.ArgumentError, match="k is a masked array, and its mask would be lost"):
        orchard.attention_forward(q, np.ma.masked_array(q, q > 0), q)


def test_no_memory_for_a_result():
    one = np.ones((1, 1, 1, 1), np.float32)
    q, v = np.broadcast_to(one, (64, 4096, 2**30, 1)), np.broadcast_to(one, (64, 4096, 1, 512))
    k = np.broadcast_to(one, (64, 4096, 1, 1))
    for kind in (np.asarray, lambda x: torch.as_strided(torch.ones(1), x.shape, (0,) * 4), memoryview):
        with pytest.raises(orchard.OutOfMemoryError, match=r"no memory for out, \[64, 4096, 1073"):
            orchard.attention_forward(kind(q), kind(k), kind(v))


def test_exceptions_of_others_arrive_as_they_are(monkeypatch):
    """Those of a signal's handler, say: a deadline is not a reason to try another way."""
    def late(*_, **__):
        raise TimeoutError("deadline")

    q = numbers(1, 1, 8, 8)
    exporter = Exporter(numbers(1, 1, 8, 8))
    exporter.__dlpack__ = late
    number = type("Number", (), {"__index__": late, "__float__": late})()
    for call in (lambda: orchard.attention_forward(exporter, q, q),
                 lambda: orchard.attention_forward(q, q, q, seed=number),
                 lambda: orchard.attention_forward(q, q, q, scale=number)):
        with pytest.raises(TimeoutError, match="deadline"):
            call()
    monkeypatch.setattr(_buffers, "_dtype", late)
    block = bytearray(4 * 8 * 8)
    with pytest.raises(TimeoutError, match="deadline"):
        orchard.attention_forward(memoryview(block).cast("f", [1, 1, 8, 8]), q, q)


def test_a_refused_buffer_is_given_back_at_once():
    block = array.array("I", [1, 2, 3, 4])
    with pytest.raises(orchard.DtypeError, match='format "I"') as held:
        orchard.attention_forward(block, None, None)
    block.append(0)  # while the traceback lives
    assert held.tb is not None


@pytest.mark.parametrize("kind", [lambda block: memoryview(block).cast("f", [1, 1, 8, 8]),
                                  lambda block: np.frombuffer(block, "f4").reshape(1, 1, 8, 8)])
def test_an_interrupt_leaves_nothing_held(kind):
    """A bytearray that is held cannot grow."""
    def interrupt(*_):
        raise KeyboardInterrupt

    before, deadline = signal.signal(signal.SIGALRM, interrupt), time.monotonic() + 3
    try:
        while time.monotonic() < deadline:
            block = bytearray(4 * 8 * 8)
            x = kind(block)
            try:
                signal.setitimer(signal.ITIMER_REAL, RNG.uniform(2e-5, 4e-4))
                while True:
                    orchard.attention_forward(x, x, x)
            except KeyboardInterrupt:
                pass
            del x
            block.append(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
