"""The explicit formula of attention.h in plain torch, with every option of orchard.torch, and how a
call is checked against it: forward, backward, the error bar."""

import functools
import math

import torch

EPSILON = {torch.float64: 2.0 ** -52, torch.float32: 2.0 ** -23, torch.float16: 2.0 ** -10,
           torch.bfloat16: 2.0 ** -7}


@functools.lru_cache(maxsize=None)
def visible(T, S, *, is_causal=False, bottom_right=False, window=None, lengths=None, B=1):
    """bool [B,1,T,S] by a loop over single positions: slow and plain."""
    seen = torch.zeros(B, 1, T, S, dtype=torch.bool)
    left, right = window or (-1, -1)
    for b in range(B):
        keys = S if lengths is None else lengths[b]
        for i in range(T):
            at = i + keys - T if bottom_right else i
            for j in range(keys):
                seen[b, 0, i, j] = not ((is_causal and j > at) or (left >= 0 and j < at - left)
                                        or (right >= 0 and j > at + right))
    return seen


def formula(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *, bias=None,
            window=None, softcap=None, alibi_slopes=None, sinks=None, causal_alignment="top_left",
            key_lengths=None, factor=None, dtype=None):
    """(out, lse) in `dtype` (q's if None): scores, softmax and products as whole matrices."""
    given = q.dtype
    dtype = dtype or given
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    B, H, T, D = q.shape
    S = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    bottom_right = causal_alignment == "bottom_right"
    lengths = None if key_lengths is None else tuple(key_lengths.tolist())
    seen = visible(T, S, is_causal=is_causal, bottom_right=bottom_right, window=window,
                   lengths=lengths, B=B)
    score = (q @ k.mT) * (1 / math.sqrt(D) if scale is None else scale)
    if softcap:
        score = torch.tanh(score / softcap) * softcap
    if alibi_slopes is not None:
        ends = torch.full((B,), S) if key_lengths is None else key_lengths
        start = (ends - T if bottom_right else torch.zeros(B, dtype=torch.int64)).view(B, 1, 1, 1)
        far = (torch.arange(T).view(-1, 1) + start - torch.arange(S)).abs()
        score = score - alibi_slopes.to(dtype).view(-1, H, 1, 1) * far
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        score = score + attn_mask.to(dtype)
    if bias is not None:
        score = score + bias.to(dtype)
    score = torch.where(seen, score, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        score = torch.cat([score, column], -1)
    alive = (score > -torch.inf).any(-1, keepdim=True)
    safe = torch.where(alive, score, 0.0)
    weight = torch.where(alive, torch.softmax(safe, -1), 0.0)[..., :S]
    lse = torch.where(alive[..., 0], torch.logsumexp(safe, -1), -torch.inf)
    if factor is not None:
        weight = weight * factor.to(dtype)
    return (weight @ v).to(given), lse


def largest(tensor):
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def assert_within(name, found, exact, plain):
    """max|found - exact| <= 2 max|plain - exact| + 4 ulp(max|exact|), the project's error bar."""
    assert found.shape == exact.shape, (name, found.shape, exact.shape)
    infinite = exact.isinf()
    assert torch.equal(found.isinf(), infinite), f"{name}: infinities differ"
    assert not found.isnan().any(), f"{name} has NaN"
    found, exact, plain = (torch.where(infinite, 0.0, x.double()) for x in (found, exact, plain))
    # In fp64 the reference rounds as well: its own error is of the order of ulps.
    ulps = 32 if name[1] == torch.float64 else 4
    bar = 2 * largest(plain - exact) + ulps * EPSILON[name[1]] * largest(exact)
    error = largest(found - exact)
    assert error <= bar, f"{name}: error {error:.3g}, bar {bar:.3g}"


# ---- A call on trial -----------------------------------------------------------------------------

def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def differentiable(options):
    """The operands beside q, k, v that take a gradient."""
    names = ["sinks", "bias"] if "bias" in options else ["sinks", "attn_mask"]
    return [n for n in names if n in options and options[n].dtype != torch.bool]


def run(function, tensors, options, names, dout, dlse, place=lambda x: x, **more):
    """out, lse and all gradients, on the CPU; `place` puts a tensor where the function wants it."""
    leaves = [place(x.detach()).requires_grad_() for x in tensors]
    extra = {n: place(options[n].detach()).requires_grad_() for n in names}
    others = {n: place(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = function(*leaves, **{**others, **extra}, **more)
    loss = [out, torch.where(lse.isinf(), 0.0, lse)]
    grads = torch.autograd.grad(loss, leaves + list(extra.values()),
                                [place(dout.to(out.dtype)), place(dlse.to(lse.dtype))])
    return [x.detach().cpu() for x in (out, lse, *grads)]


def check_values(function, tensors, options, name, *, factor=None, seed=None, place=lambda x: x):
    """Runs the function, the formula in fp64 and the formula as torch computes it; compares all
    results and returns the function's. `factor` is what dropout after `seed` does."""
    dtype = tensors[0].dtype
    names = differentiable(options)
    dout = rand(*tensors[0].shape[:-1], tensors[2].shape[-1], dtype=dtype)
    dlse = rand(*tensors[0].shape[:-1], dtype=wide(dtype))
    plain_options = {n: x for n, x in options.items() if n != "dropout_p"}
    exact_options = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                     for n, x in plain_options.items()}
    if seed is not None:
        torch.manual_seed(seed)
    found = run(function, tensors, options, names, dout, dlse, place, return_lse=True)
    exact = run(formula, [x.double() for x in tensors], exact_options, names, dout, dlse,
                factor=factor)
    plain = run(formula, tensors, plain_options, names, dout, dlse, dtype=wide(dtype),
                factor=factor)
    results = ["out", "lse", "dq", "dk", "dv", *names]
    for what, f, e, p in zip(results, found, exact, plain):
        # Gradients start from out as it was rounded to q's dtype, whatever their own dtype is.
        assert_within((f"{name} {what}", f.dtype if what == "lse" else dtype), f, e, p)
    return dict(zip(results, found))
