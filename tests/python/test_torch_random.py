"""20,000 random argument lists (hypothesis) for orchard.torch.scaled_dot_product_attention and the ops
below it (on the CPU those of kernel.c): each gives results of the right shape or raises one of the
documented exceptions; nothing else happens, and no input changes.

Runs in a process of its own, so that a crash is counted as what it is. Some results are compared with torch's own math path. Beside the CPU there are meta
tensors and, on Linux, the fake of torch.mps, where kernels are compiled for the plainest call only:
every other call is refused there and PyTorch's to do.
"""
import sys

import random_lists

# ---- The child -----------------------------------------------------------------------------------

def prepare():
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import orchard
    from orchard.torch import mps
    from orchard.torch.attention import ops
    from orchard.torch import scaled_dot_product_attention as attention

    torch.set_num_threads(2)
    devices = ["cpu"] * 14 + ["meta"]
    place = {"cpu": lambda x: x, "meta": lambda x: x.detach().to("meta")}
    if sys.platform.startswith("linux"):
        import fake_mps
        fake_mps.install()
        few = few_kernels(fake_mps)
        mps.launcher = mps.Launcher(few)
        q = [fake_mps.tensor(torch.randn(1, 2, 3, 4)).requires_grad_() for _ in range(3)]
        attention(*q).sum().backward()
        few.closed = True
        devices += ["mps"] * 2
        place["mps"] = lambda x: fake_mps.tensor(x.detach())

    real = [torch.float32] * 12 + [torch.float64] * 4 + [torch.float16, torch.bfloat16] * 3
    other = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
             torch.complex64, torch.float8_e4m3fn, torch.uint16]
    odd = [None, 0, -1, 3, 2 ** 31, 2 ** 63, -2 ** 70, 1.5, float("nan"), float("inf"), -0.0, "",
           "top_left", b"x", [], (), (1,), (1, 2), (-1, 2.5), {}, object(), True, complex(1, 2),
           torch.tensor(1.0), torch.tensor([1, 2]), torch.zeros(0), torch.float32, torch.device("cpu")]
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2,
                 torch.bfloat16: 1e-1}

    class Draw:
        """One list: its tensors and what is known of them."""

        def __init__(self, r):
            self.r = r
            self.generator = torch.Generator().manual_seed(r.number())
            self.dtype = r.choice(real) if r.random() < 0.96 else r.choice(other)
            self.device = r.choice(devices)
            self.grad = r.random() < 0.4
            self.plain = self.dtype in tolerance  # finite numbers, all of it right
            self.made = []

        def size(self):
            return self.r.choice([0, 1, 1, 2, 3, 4, 5, 8, 17])

        def maybe(self, make, chance=0.15):
            return make() if self.r.random() < chance else None

        def values(self, shape, dtype):
            if dtype == torch.bool:
                return torch.rand(shape, generator=self.generator) < 0.7
            x = torch.randn(shape, generator=self.generator)
            if x.numel() and self.r.random() < 0.01:
                self.plain = False
                x.view(-1)[0] = self.r.choice([float("nan"), float("inf"), -float("inf"), 1e38])
            return x.to(dtype)

        def laid(self, x):
            """The same numbers with other strides; or repeated ones."""
            choice = self.r.randrange(7)
            if choice == 0 and x.dim() > 1:
                order = self.r.sample(range(x.dim()), x.dim())
                back = sorted(range(x.dim()), key=order.__getitem__)
                return x.permute(order).contiguous().permute(back)
            if choice == 1 and x.dim() and x.shape[0]:
                return x[:1].expand(x.shape)
            if choice == 2 and x.dim():
                return torch.stack([x, x], -1)[..., 1]
            if choice == 3 and x.dim():
                return torch.cat([x.new_zeros(1, *x.shape[1:]), x])[1:]
            if choice == 4 and x.is_floating_point() and x.dtype != torch.float8_e4m3fn:
                return torch._neg_view(x)
            if choice == 5 and x.dim():
                return x[..., ::2].repeat_interleave(2, -1)[..., :x.shape[-1]]
            return x

        def strange(self, x):
            """What has no business here."""
            choice = self.r.randrange(6)
            if choice == 0 and x.dim():
                return x.to_sparse()
            if choice == 1 and x.dim() > 1 and x.shape[0]:
                return torch.nested.nested_tensor(list(x.unbind()))
            if choice == 2:
                return self.r.choice(odd)
            if choice == 3 and x.dtype == torch.float32:
                return x.to_mkldnn()
            if choice == 4:
                with torch.inference_mode():
                    return x.clone()
            return place[self.r.choice(list(place))](x)

        def tensor(self, *shape, dtype=None, values=None, wrong=0.012, grad=True):
            r, shape, dtype = self.r, list(shape), dtype or self.dtype
            if r.random() < wrong:
                self.plain = False
                if shape and r.random() < 0.6:
                    shape[r.randrange(len(shape))] = self.size()
                else:
                    shape = shape[1:] if r.random() < 0.5 else [self.size(), *shape]
                values = None
            if r.random() < wrong:
                dtype, self.plain = r.choice(real + other), False
            x = self.values(shape, dtype) if values is None else torch.tensor(values).to(dtype)
            if r.random() < 0.25:
                x = self.laid(x)
            if r.random() < wrong:
                self.plain = False
                try:
                    return self.strange(x)
                except (RuntimeError, NotImplementedError):  # torch cannot make it
                    pass
            x = place[self.device](x)
            if grad and self.grad and x.is_floating_point() and r.random() < 0.7 and x.is_leaf:
                x.requires_grad_()
            self.made.append((x, x._version))
            return x

        def replace(self, named, chance=0.08):
            """One of the arguments becomes something odd."""
            if named and self.r.random() < chance:
                self.plain = False
                named[self.r.choice(list(named))] = self.r.choice(odd)

    # ---- Lists ----

    def sizes(d):
        r = d.r
        G = r.choice([1, 1, 2, 3])
        H = G * r.choice([1, 1, 2]) if r.random() < 0.95 else 5
        return d.size(), H, G, d.size(), d.size(), d.size() or 1, d.size() or 1

    def shared(d, B, H, T, S, packed):
        """What function and ops have in common, by the function's names."""
        r = d.r
        wide = torch.float64 if d.dtype == torch.float64 else torch.float32
        if r.random() < 0.4:
            return {}
        either = lambda n: r.choice([1, n])
        lengths = [r.randrange(S + 1) + (r.random() < 0.05) for _ in range(B)]
        return {name: x for name, x in {
            "bias": d.maybe(lambda: d.tensor(either(B), either(H), either(T), either(S))),
            "attn_mask": d.maybe(lambda: d.tensor(either(B), either(H), either(T), either(S),
                                                  dtype=torch.bool)),
            "alibi_slopes": d.maybe(lambda: d.tensor(*r.choice([(H,), (B, H)]), dtype=wide,
                                                     grad=r.random() < 0.1)),
            "sinks": d.maybe(lambda: d.tensor(H, dtype=r.choice([wide, d.dtype]))),
            "key_lengths": None if packed else d.maybe(lambda: d.tensor(
                dtype=r.choice([torch.int32, torch.int64]), values=lengths), 0.08),
            "scale": r.choice([None, None, 0.5, 0, -2.0, float("nan")]),
            "window": d.maybe(lambda: (r.randrange(-1, 5), r.choice([-1, 0, 2, 2 ** 62, -2]))),
            "softcap": r.choice([None, None, None, 0.0, 2.5]),
            "dropout_p": r.choice([0.0, 0.0, 0.0, 0.5, 1.0, 1]),
            "causal_alignment": r.choice(["top_left", "top_left", "bottom_right"]),
        }.items() if x is not None}

    def packed_operands(d, H, G, D, E):
        r, n = d.r, d.r.randrange(4)
        lengths = [[r.randrange(5) for _ in range(n)] for _ in "ts"]
        kind = r.choice([torch.int32, torch.int64])
        cu = []
        for one in lengths:
            starts = [sum(one[:i]) for i in range(n + 1)]
            if r.random() < 0.05:
                starts[r.randrange(n + 1)] += r.choice([-1, 1, 2 ** 31])
            cu.append(d.tensor(dtype=torch.int64 if max(starts) > 2 ** 30 else kind, values=starts))
        t, s = (sum(one) for one in lengths)
        more = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        for name, one in zip(("max_seqlen_q", "max_seqlen_k"), lengths):
            more[name] = max(one, default=0) + r.choice([0] * 12 + [1, -1])
        return [d.tensor(t, H, D), d.tensor(s, G, D), d.tensor(s, G, E)], more

    def function_list(d):
        r = d.r
        B, H, G, T, S, D, E = sizes(d)
        packed = r.random() < 0.1
        if packed:
            tensors, options = packed_operands(d, H, G, D, E)
        else:
            lead = r.choice([(), (B,), (B,), (B,), (B,), (2, B)])
            heads = () if not lead and r.random() < 0.5 else (None,)
            tensors = [d.tensor(*lead, *(h for _ in heads), n, e)
                       for h, n, e in ((H, T, D), (G, S, D), (G, S, E))]
            options = {}
        options.update(shared(d, B, H, T, S, packed))
        options["enable_gqa"] = H != G or r.random() < 0.2
        options["is_causal"] = r.random() < 0.3
        options["return_lse"] = r.random() < 0.3
        d.replace(options)
        return tensors, options

    def op_list(d):
        """The 20 arguments of the ops' schemas."""
        r = d.r
        B, H, G, T, S, D, E = sizes(d)
        packed = r.random() < 0.12
        if packed:
            (q, k, v), more = packed_operands(d, H, G, D, E)
        else:
            q, k, v, more = d.tensor(B, H, T, D), d.tensor(B, G, S, D), d.tensor(B, G, S, E), {}
        given = {**shared(d, B, H, T, S, packed), **more}
        dropout = given.get("dropout_p", 0.0)
        left, right = given.get("window", (-1, -1))
        seed = torch.tensor(r.number()) if dropout else d.maybe(lambda: d.tensor(), 0.02)
        return {
            "q": q, "k": k, "v": v, "bias": given.get("bias"), "mask": given.get("attn_mask"),
            "alibi": given.get("alibi_slopes"), "sinks": given.get("sinks"),
            "key_lengths": given.get("key_lengths"), "cu_seqlens_q": given.get("cu_seqlens_q"),
            "cu_seqlens_k": given.get("cu_seqlens_k"), "seed": seed,
            "max_t": given.get("max_seqlen_q", 0), "max_s": given.get("max_seqlen_k", 0),
            "scale": given.get("scale"), "causal": r.random() < 0.3,
            "bottom_right": given.get("causal_alignment") == "bottom_right", "window_left": left,
            "window_right": right, "softcap": given.get("softcap", 0.0), "dropout": dropout}

    # ---- What came of it ----

    def same_as_torch(tensors, options, out):
        allowed = {"enable_gqa", "is_causal", "return_lse", "attn_mask", "scale", "causal_alignment"}
        if out.dim() < 4 and options["enable_gqa"]:  # torch has grouped heads in 4 dimensions only
            return False
        if (set(options) - {n for n in options if n == "dropout_p" and not options[n]} - allowed
                or options.get("causal_alignment") == "bottom_right" or out.dim() < 3
                or "attn_mask" in options and (options["is_causal"]
                                               or options["attn_mask"].dim() > out.dim())):
            return False
        more = {n: x for n, x in options.items() if n in allowed - {"return_lse", "causal_alignment"}}
        host = [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in (*tensors, *more.values())]
        more = dict(zip(more, host[3:]))
        with sdpa_kernel(SDPBackend.MATH):
            theirs = F.scaled_dot_product_attention(*host[:3], **more)
        close = tolerance[out.dtype]
        torch.testing.assert_close(out.detach().cpu(), theirs, rtol=close, atol=close)
        return True

    def check_function(d, tensors, options, made):
        lse = None
        if options["return_lse"]:
            assert isinstance(made, tuple) and len(made) == 2
            made, lse = made
        q, k, v = tensors
        rank = max(x.dim() for x in tensors)
        shapes = [(1,) * (max(rank, 3) - x.dim()) + tuple(x.shape) for x in tensors]
        if options.get("cu_seqlens_q") is not None:
            lead = (q.shape[0], q.shape[1] if options["enable_gqa"] else max(s[1] for s in shapes))
        else:
            heads = shapes[0][-3:-2] if options["enable_gqa"] else torch.broadcast_shapes(
                *(s[-3:-2] for s in shapes))
            lead = torch.broadcast_shapes(*(s[:-3] for s in shapes)) + heads + shapes[0][-2:-1]
            lead = lead[3 - rank:] if rank < 3 else lead
        assert made.shape == (*lead, v.shape[-1]), (made.shape, lead, v.shape)
        assert made.dtype == q.dtype and made.device == q.device
        if lse is not None:
            assert lse.shape == tuple(lead) and lse.dtype == (
                torch.float64 if q.dtype == torch.float64 else torch.float32)
        # torch's flash kernel, which stands in on the fake of mps, multiplies -inf by a scale of 0.
        if d.plain and d.device != "meta" and (d.device == "cpu" or options.get("scale") != 0):
            assert made.isfinite().all()
            if d.r.random() < 0.5 and made.numel() and k.numel():
                return same_as_torch(tensors, options, made)
        return False

    def differentiate(d, tensors, options, made):
        """Gradients of every leaf, in its shape and dtype; sometimes of second order."""
        out = made[0] if isinstance(made, tuple) else made
        leaves = [x for x in (*tensors, *options.values())
                  if isinstance(x, torch.Tensor) and x.requires_grad]
        assert out.requires_grad == bool(leaves)
        if not leaves:
            return ""
        # On mps PyTorch's own attention may have done it, which has no second order.
        again = d.r.random() < 0.1 and d.device == "cpu"
        dout = torch.ones_like(out) if d.r.random() < 0.5 else out.new_ones(()).expand(out.shape)
        grads = torch.autograd.grad(out, leaves, dout, create_graph=again, allow_unused=True)
        for leaf, grad in zip(leaves, grads):
            if grad is None:  # PyTorch's own attention forgets a mask beside empty tensors
                assert d.device == "mps" and not all(x.numel() for x in tensors)
                continue
            assert grad.shape == leaf.shape and grad.dtype == leaf.dtype
        if again:
            torch.autograd.grad(sum(x.double().square().sum() for x in grads), leaves,
                                allow_unused=True)
        return " twice" if again else " and backward"

    def function(d):
        tensors, options = function_list(d)
        d.replace(dict.fromkeys(range(3)))
        made = attention(*tensors, **options)
        if any(isinstance(options[n], torch.Tensor) for n in ("enable_gqa", "return_lse")):
            return "computed"  # and was not looked at
        compared = check_function(d, tensors, options, made)
        return ("compared" if compared else "computed") + differentiate(d, tensors, options, made)

    def plain(given):
        """The arguments that the ops without options take too."""
        return {name: given[name] for name in ("q", "k", "v", "scale", "causal")}

    def forward(d):
        op, given = ops.forward, op_list(d)
        if d.device == "cpu" and d.r.random() < 0.2:
            op, given = d.r.choice([ops.plain_forward, ops.plain_forward_rest]), plain(given)
        elif d.r.random() < 0.3:
            op = ops.forward_rest
        d.replace(given)
        out, lse, *rest = op(*given.values())
        q, v = given["q"], given["v"]
        assert out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == q.shape[:-1]
        assert out.dtype == q.dtype and out.device == q.device == lse.device
        assert all((x.shape, x.dtype, x.device) == (lse.shape, lse.dtype, lse.device) for x in rest)
        if d.plain and d.device != "meta":
            assert out.isfinite().all()
        return "computed"

    def shape_of(x, otherwise):
        return tuple(x.shape) if isinstance(x, torch.Tensor) and not x.is_nested else otherwise

    def backward(d):
        given = op_list(d)
        q, v = given["q"], given["v"]
        shape = shape_of(q, (1, 2, 3, 4))
        shape = (*shape[:-1], *shape_of(v, (4,))[-1:])
        wide = torch.float64 if d.dtype == torch.float64 else torch.float32
        dout, out = d.tensor(*shape), d.tensor(*shape)
        lse = d.tensor(*shape[:-1], dtype=wide)
        own = {"needs": d.r.choice([7, 7, 7, 7, 1, 2, 4, 31, 15, 16, 0, 32, -1, 2 ** 40]),
               "dout": dout, "dlse": d.maybe(lambda: d.tensor(*shape[:-1], dtype=wide)),
               "out": out, "lse": lse,
               "lse_rest": d.maybe(lambda: d.tensor(*shape[:-1], dtype=wide))}
        op = ops.backward
        if d.device == "cpu" and own["dlse"] is None and d.r.random() < 0.3:
            del own["dlse"]
            own["lse_rest"] = lse if own["lse_rest"] is None else own["lse_rest"]
            op, given = ops.plain_backward, plain(given)
        given = {**own, **given}
        d.replace(given)
        made = op(*given.values())
        if not isinstance(given["needs"], int):  # torch takes a dtype, or a tensor of one, for a number
            return "computed"
        for bit, name, one in zip((1, 2, 4, 8, 16), ("q", "k", "v", "bias", "sinks"), made):
            like = given.get(name)
            if given["needs"] & bit and like is not None:
                assert one.shape == like.shape and one.dtype == like.dtype
            else:
                assert one.shape == (0,)
        return "computed"

    def one(r):
        d = Draw(r)
        call = d.r.choice([function] * 5 + [forward] * 2 + [backward] * 3)
        try:
            answer = call(d)
        except orchard.OrchardError as why:
            answer, message = type(why).__name__, str(why)
            assert message.startswith("attention") and len(message) > 25, message
            assert "\n" not in message, message
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as why:
            # The ops are torch's to call: it refuses by the schema, and wraps kernel.c's messages.
            message = str(why)
            ours = message.startswith("attention_")
            assert call is not function or message.startswith(
                "Inference tensors cannot be saved"), f"{type(why).__name__}: {message}"
            assert ours or is_torchs(message), f"{type(why).__name__}: {message}"
            answer = "a message by torch" if ours else "refused by torch"
        for x, version in d.made:
            assert x._version == version, "an input was written to"
        return f"{call.__name__} on {d.device}: {answer}"

    return one


def is_torchs(message):
    """Whether these are words of torch's dispatcher about arguments and where they are."""
    return any(words in message for words in (
        "Expected a value of type", "Could not run", "expected at most", "cannot be converted",
        "Inference tensors", "Overflow", "does not have", "must be", "no kernel for MPS",
        "no fake impl or Meta kernel"))


def few_kernels(fake_mps):
    """torch.mps whose compiler refuses new texts once `closed` is set."""
    import torch

    class Few:
        closed = False

        def compile_shader(self, text):
            if self.closed:
                raise SyntaxError("no more kernels are compiled in this test")
            return torch.mps.compile_shader(text)
    return Few()


# ---- The parent ----------------------------------------------------------------------------------

def test_random_argument_lists():
    counts = random_lists.counts_of(__file__)
    # A generator that is refused all the time, or never, would prove nothing.
    for what, least in (("function on cpu: computed", 2000), ("function on cpu: compared", 300),
                        ("function on cpu: computed and backward", 1000),
                        ("function on cpu: compared and backward", 150),
                        ("function on cpu: computed twice", 100), ("forward on cpu: computed", 1500),
                        ("backward on cpu: computed", 1500), ("function on meta: computed", 200),
                        ("backward on meta: computed", 150)):
        assert counts[what] >= least, (what, counts)
    for kind in ("ArgumentError", "ShapeError", "DtypeError", "UnsupportedError"):
        assert counts[f"function on cpu: {kind}"] >= 100, counts
    for call in ("forward", "backward"):
        assert counts[f"{call} on cpu: a message by torch"] >= 400, counts
        assert counts[f"{call} on cpu: refused by torch"] >= 100, counts
    if sys.platform.startswith("linux"):
        for what in ("computed", "computed and backward", "compared", "compared and backward"):
            assert counts[f"function on mps: {what}"] >= 15, counts


def test_a_crash_would_be_seen():
    random_lists.check_that_a_crash_is_seen(__file__)


if __name__ == "__main__":
    random_lists.child(prepare)
