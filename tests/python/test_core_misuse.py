"""20,000 random argument lists (hypothesis): each is computed or refused with a message; nothing else
happens.

Runs in a process of its own, so that a crash is counted as what it is. Guard bytes around every output show writes outside; a refused call writes nothing.
"""
import random_lists

# ---- The child -----------------------------------------------------------------------------------


def prepare():
    import numpy as np
    import orchard
    import torch

    guard = 64
    numpy_dtypes = ["float32"] * 16 + ["float64"] * 6 + ["float16"] * 6 + [
        "int32", "int64", "bool", "uint8", "complex64", ">f4", "uint32"]
    odd = [None, 0, -1, 3, 2**31, 2**63, 2**64, -2**70, 1.5, float("nan"), float("inf"), -0.0, "",
           "cpu", "no\0", b"cpu", [], (), (1,), (1, 2, 3), {}, object(), True, np.float32(2),
           np.int64(-5), np.True_, complex(1, 2)]

    def guarded(shape, dtype):
        """An array in the middle of bytes that must stay as they are."""
        count = int(np.prod(shape, dtype=np.int64))
        size = count * np.dtype(dtype).itemsize
        block = np.full(size + 2 * guard, 0xA5, np.uint8)
        return block[guard:guard + size].view(dtype).reshape(shape), block

    def disturb(r, x):
        """Another layout, kind or read-only version of the same array; sometimes nonsense."""
        choice = r.randrange(16)
        if choice == 0 and x.ndim:
            return x[..., ::-1]
        if choice == 1 and x.ndim > 1:
            return np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2)
        if choice == 2 and x.dtype.byteorder != ">" and x.dtype.kind in "fib" and x.flags.writeable:
            return torch.from_numpy(x)
        if choice == 3 and x.dtype.kind in "fi" and x.ndim:
            return memoryview(x) if x.size else x
        if choice == 4:
            x = x.copy()
            x.flags.writeable = False
            return x
        if choice == 5 and x.dtype == np.float32:
            return torch.from_numpy(x).to(torch.bfloat16)
        if choice == 6 and x.ndim:
            return np.broadcast_to(x[:1], x.shape)
        if choice == 7 and x.ndim:
            return x[1:]
        return x

    def one(r):
        rng = np.random.default_rng(r.number())
        size = lambda: r.choice([0, 1, 1, 2, 3, 4, 5, 8, 17])
        B, G, T, S, D, E = size(), r.choice([1, 1, 2, 3]), size(), size(), size() or 1, size() or 1
        H = G * r.choice([1, 1, 2]) if r.random() < 0.9 else 5
        dtype = r.choice(numpy_dtypes)
        packed, one_head = r.random() < 0.15, r.random() < 0.1
        blocks = []

        def values(*shape, kind=None, wrong=0.02, output=False):
            shape = list(shape)
            if r.random() < wrong and shape:
                shape[r.randrange(len(shape))] = size()
            if r.random() < wrong / 2:
                shape = shape[1:] if r.random() < 0.5 else [1, *shape]
            kind = r.choice(numpy_dtypes) if r.random() < wrong else kind or dtype
            array, block = guarded(tuple(shape), np.dtype(kind).newbyteorder("=")
                                   if kind[0] == ">" else kind)
            array[...] = (rng.standard_normal(array.shape) * 2).astype(array.dtype) \
                if array.dtype.kind in "fc" else rng.integers(0, 2, array.shape)
            blocks.append((block, output))
            if kind[0] == ">":
                array = array.astype(kind)
            return disturb(r, array) if r.random() < 0.3 else array

        if packed:
            n = r.randrange(4)
            lengths = [[r.randrange(5) for _ in range(n)] for _ in "ts"]
            cu = [np.cumsum([0, *x]).astype(r.choice(["int32", "int64"])) for x in lengths]
            t, s = ([int(x[-1])] for x in cu)
            q, k, v = values(*t, H, D), values(*s, G, D), values(*s, G, E)
            out_shape, lse_shape = (*t, H, E), (*t, H)
        elif one_head:
            q, k, v = values(B, T, D), values(B, S, D), values(B, S, E)
            out_shape, lse_shape = (B, T, E), (B, T)
        else:
            q, k, v = values(B, H, T, D), values(B, G, S, D), values(B, G, S, E)
            out_shape, lse_shape = (B, H, T, E), (B, H, T)
        wide = "float64" if dtype == "float64" else "float32"
        heads = 1 if one_head else H
        either = lambda n: r.choice([1, n])
        maybe = lambda make, chance=0.2: make() if r.random() < chance else None
        call = {
            "bias": maybe(lambda: values(either(B), either(heads), either(T), either(S))),
            "mask": maybe(lambda: values(either(B), either(heads), either(T), either(S),
                                         kind="bool")),
            "alibi": maybe(lambda: values(heads, kind=wide)),
            "sinks": maybe(lambda: values(heads, kind=r.choice([wide, dtype]))),
            "key_lengths": maybe(lambda: rng.integers(-(r.random() < 0.1), S + 1, B), 0.1),
            "scale": r.choice([None, None, 0.5]), "causal": r.random() < 0.4,
            "align": r.choice(["top_left", "bottom_right"]),
            "window": maybe(lambda: (r.randrange(-1, 5), r.choice([None, -1, 0, 2, 2**62]))),
            "softcap": r.choice([0, 0, 2.5]), "dropout": r.choice([0, 0, 0.5, 1]),
            "seed": r.number(), "dropout_offset": r.number() >> 31,
            "threads": r.choice([0, 1, 2]), "backend": r.choice([None, "cpu", "ref", "cpu,ref"]),
            "out": maybe(lambda: values(*out_shape, output=True), 0.3),
            "lse": maybe(lambda: values(*lse_shape, kind=wide, output=True), 0.3),
        }
        if packed:
            call.update(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_t=max(lengths[0], default=0),
                        max_s=max(lengths[1], default=0))
        if r.random() < 0.25:
            call[r.choice([*call, "max_t", "max_s", "cu_seqlens_q"])] = r.choice(odd)
        backward = r.random() < 0.4
        if r.random() < 0.03:
            call["out"] = r.choice([q, k, v])
        if r.random() < 0.03:
            q, k, v = r.sample([q, k, v], 3)
        if r.random() < 0.03:
            q = r.choice(odd)
        call = {name: value for name, value in call.items() if value is not None}
        before = [block.tobytes() for block, _ in blocks]
        try:
            if backward:
                out, lse = call.pop("out", None), call.pop("lse", None)
                dout = values(*out_shape)
                out = values(*out_shape) if out is None else out
                lse = values(*lse_shape, kind=wide) if lse is None else lse
                want = r.choice([("dq", "dk", "dv")] * 6 + [
                    ("dq",), "dv", ("dbias",), ("dsinks", "dk"), (), ("dx",), 5])
                if r.random() < 0.2:
                    call["dk"] = values(*getattr(k, "shape", (1, 2)), output=True)
                before = [block.tobytes() for block, _ in blocks]
                orchard.attention_backward(dout, q, k, v, out, lse, want=want, **call)
            else:
                orchard.attention_forward(q, k, v, **call)
            answer = "computed"
        except orchard.OrchardError as why:
            answer = type(why).__name__
            message = str(why)
            assert message.startswith(("attention_forward: ", "attention_backward: ",
                                        "ctx_create: ")), message
            assert len(message) > 25 and "\n" not in message, message
        for (block, output), old in zip(blocks, before):
            new = block.tobytes()
            assert new[:guard] == old[:guard] and new[-guard:] == old[-guard:], "a guard was hit"
            assert new == old or (output and answer == "computed"), \
                "memory of an input, or of a refused call, changed"
        return ("backward " if backward else "forward ") + answer

    return one


# ---- The parent ----------------------------------------------------------------------------------


def test_random_argument_lists():
    counts = random_lists.counts_of(__file__)
    # A generator that is refused all the time, or never, would prove nothing.
    for what in ("forward computed", "backward computed"):
        assert counts[what] >= random_lists.CALLS // 20, counts
    for kind in ("ArgumentError", "ShapeError", "DtypeError", "LayoutError"):
        for call in ("forward", "backward"):
            assert counts.get(f"{call} {kind}", 0) >= 20, counts


def test_a_crash_would_be_seen():
    random_lists.check_that_a_crash_is_seen(__file__)


if __name__ == "__main__":
    random_lists.child(prepare)
