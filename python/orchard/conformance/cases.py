"""The questions: every case has a name, the failure it stands for, and what is called.

Cases of values are lists of Problems; a case passes if all of them do, output and gradients alike.
What is not a matter of values (dropout, memory, repeatability, autograd's own rules) is a function
in behaviour.py. `source` names the report of users that a case stands for; "contract" marks what
an attention function should simply have.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, List, Optional, Tuple

from . import behaviour
from .check import NO_FLOAT64, PASSES, Verdict, check
from .problem import Problem, has_float64
from .targets import Target

DTYPES = ("float64", "float32", "float16", "bfloat16")
HALVES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    area: str
    source: str
    says: str                                   # what must hold, in one sentence
    problems: Tuple[Problem, ...] = ()
    check: Optional[Callable[[Target, str], Verdict]] = None
    large: bool = False                         # needs gigabytes or a minute: run when asked

    def run(self, target: Target, device: str = "cpu") -> Verdict:
        if self.check:
            return self.check(target, device)
        asked = [problem for problem in self.problems
                 if problem.dtype != "float64" or has_float64(device)]
        verdict = Verdict(PASSES, 0.0) if asked else NO_FLOAT64
        for problem in asked:
            verdict = verdict.worse(check(target, problem, device))
        return verdict


def each(dtypes: Tuple[str, ...] = DTYPES, **fields) -> Tuple[Problem, ...]:
    return tuple(Problem(dtype=dtype, **fields) for dtype in dtypes)


def several(field: str, values, **fields) -> Tuple[Problem, ...]:
    return tuple(Problem(**{field: value}, **fields) for value in values)


VALUES = [
    Case("plain", "values", "contract",
         "softmax(q k^T / sqrt(D)) v and its gradients, in four dtypes", each()),
    Case("causal", "values", "contract",
         "query i sees keys 0 ... i", each(causal=True)),
    Case("causal, more keys than queries", "values", "contract",
         "is_causal is aligned at the top left, as torch documents it",
         each(causal=True, T=19, S=45)),
    Case("causal, more queries than keys", "values", "contract",
         "late queries see every key", each(causal=True, T=45, S=19)),
    Case("cross attention", "values", "pytorch #103343",
         "T != S, values and gradients", each(T=21, S=70) + each(T=70, S=21)),
    Case("one head, rank 3", "values", "contract", "[B,T,D] tensors", each(rank=3)),
    Case("scale given", "values", "contract", "scale replaces 1/sqrt(D)", each(scale=0.37)),
    Case("scale 1", "values", "first Orchard (O15)",
         "scale=1.0 is not taken for the default", each(scale=1.0, D=16)),
    Case("scale 0 and negative", "values", "contract",
         "a scale of 0 means the mean of the values, a negative one turns the order round",
         several("scale", (0.0, -0.5))),
    Case("large scores", "values", "flash-attention #334, #443, #1052; pytorch #125674",
         "scores of hundreds give no NaN, forward or backward",
         each(("float32", "bfloat16"), size=12.0) + each(("float32",), size=12.0, causal=True)),
    Case("float16 products beyond 65504", "values", "flash-attention #443",
         "q.k overflows float16, the scaled score does not",
         each(("float16",), size=60.0, D=64, scale=1e-4)),
    Case("short q against long k", "values", "pytorch #190791",
         "bfloat16 stays within the bar at 14,000 keys",
         each(("bfloat16",), B=1, H=1, T=24, S=14000, D=64)),
    Case("head sizes", "values", "mlx #3842, #3943, #4330",
         "any head size, not only 64 and 128",
         several("D", (1, 3, 7, 8, 40, 72, 80, 96, 100), T=23) +
         several("D", (128, 192, 256, 512), B=1, H=2, T=23)),
    Case("head size of v differs", "values", "pytorch #176767",
         "Dv != Dq gives the right shape, values and gradients",
         each(D=24, E=40) + each(D=48, E=16, causal=True)),
    Case("grouped heads", "values", "contract",
         "query head h uses key head h / (H/G); dk and dv are summed over the group",
         each(H=6, G=2) + each(H=4, G=1, causal=True)),
    Case("grouped heads with a mask", "values", "pytorch #149132",
         "enable_gqa together with attn_mask",
         each(("float32", "bfloat16"), H=6, G=2, mask="bool", mask_shape="BHTS") +
         each(("float32",), H=6, G=2, mask="float", mask_shape="1HTS")),
    Case("empty", "values", "contract",
         "sizes of 0 give empty tensors, no keys gives zeros",
         (Problem(S=0), Problem(T=0, S=5), Problem(B=0))),
    Case("one of each", "values", "contract", "B = H = T = S = 1",
         each(B=1, H=1, T=1) + (Problem(B=1, H=1, T=1, D=1),)),
]

LENGTHS = [
    Case("lengths around a tile", "lengths", "pytorch #169222",
         "lengths that are no multiple of 32 or 64",
         several("T", (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129), B=1,
                 H=2)),
    Case("decoding", "lengths", "pytorch #169222",
         "one query against key lengths that are no multiple of 32",
         several("S", (1, 31, 33, 47, 100, 511, 513, 1023, 1025, 2049), B=1, H=2, T=1, D=64)),
    Case("decoding, grouped heads", "lengths", "mlx #4330",
         "a few queries, many keys, grouped heads",
         several("S", (65, 1031, 1500), B=2, H=8, G=2, T=3, D=64)),
    Case("causal, odd lengths", "lengths", "metalcore M13",
         "the last, partial block of a causal call",
         several("T", (65, 100, 191, 257), B=1, H=2, causal=True)),
    Case("more than 32,768 keys and a mask", "lengths", "mlx #3361",
         "no 16-bit index in the mask",
         (Problem(B=1, H=1, T=3, S=33001, D=8, mask="bool", mask_shape="TS"),
          Problem(B=1, H=1, T=3, S=33001, D=8, mask="float", mask_shape="TS"))),
    Case("a mask at large length", "lengths", "pytorch #162588",
         "T and S beyond a thousand with attn_mask",
         (Problem(B=1, H=1, T=1030, S=1100, D=16, mask="bool", mask_shape="TS"),
          Problem(B=1, H=1, T=1030, S=1100, D=16, mask="float", mask_shape="1HTS",
                  dtype="bfloat16"))),
    Case("the batch size changes", "lengths", "pytorch #177116",
         "gradients stay right when one call's batch is smaller than the last",
         several("B", (4, 2, 4, 1, 3), T=33, causal=True)),
]

LAYOUT = [
    Case("permuted q, k, v", "layout", "pytorch #181133, #163597",
         "[B,T,H,D] in memory, seen as [B,H,T,D]", each(layout="permuted") +
         each(("float32",), layout="permuted", T=3, S=70, D=64)),
    Case("slices of one projection", "layout", "pytorch #181133",
         "q, k, v inside one [B,T,3,H,D] block", each(("float32", "bfloat16"),
                                                       layout="one-projection")),
    Case("head size not innermost", "layout", "pytorch #163597",
         "the last dimension has a stride", several("layout", ("head-last", "every-second"))),
    Case("rows with gaps, odd offset", "layout", "pytorch #163597",
         "storage offset and padded rows; what lies between is NaN",
         several("layout", ("offset", "padded-rows", "batch-inside"))),
    Case("expanded keys", "layout", "pytorch #181133",
         "keys and values of stride 0 over the heads", (Problem(layout="expanded-keys", H=4),)),
    Case("permuted gradient", "layout", "pytorch #133671, #175188",
         "the gradient that comes in is a permuted view",
         several("dout", ("permuted", "head-last", "padded-rows")) +
         (Problem(layout="permuted", dout="permuted"),)),
    Case("sum().backward()", "layout", "first Orchard (S0)",
         "the gradient that comes in has stride 0 everywhere", each(dout="expanded")),
    Case("contiguous gradient of a permuted call", "layout", "pytorch #133671",
         "inputs permuted, incoming gradient not", (Problem(layout="permuted"),
                                                    Problem(layout="permuted", causal=True))),
]

MASKS = [
    Case("boolean mask", "masks", "metal-flash-attention forks",
         "True means: may see", each(mask="bool")),
    Case("boolean mask, broadcast", "masks", "contract",
         "sizes of 1 and missing dimensions are repeated",
         several("mask_shape", ("TS", "11TS", "B11S", "1HTS", "B1TS", "BH1S"), mask="bool")),
    Case("additive mask", "masks", "mps-flash-attention (bias before scale; threshold)",
         "added after the scale, never turned into yes and no",
         each(mask="float") + each(("float32",), mask="float", scale=0.1)),
    Case("additive mask, broadcast", "masks", "contract",
         "sizes of 1 and missing dimensions are repeated",
         several("mask_shape", ("TS", "1HTS", "B11S", "BHT1"), mask="float")),
    Case("float32 mask beside 16-bit q", "masks", "contract",
         "added with all its digits, its gradient in float32 too",
         each(HALVES, mask="float-wide") +
         each(HALVES, mask="float-wide", mask_shape="1HTS", grads="qkvm")),
    Case("float32 mask beside float64 q", "masks", "found with Orchard, torch 2.13",
         "read as what it is", each(("float64",), S=40, mask="float-wide")),
    Case("fully masked rows", "masks", "pytorch #156707, #103749; mlx #2608",
         "a query that sees no key has output 0 and gradients 0",
         each(mask="fully-masked-rows") + each(("float32",), mask="fully_masked")),
    Case("fully masked rows by -inf", "masks", "pytorch #156707, #103963",
         "the same by an additive mask", each(mask="float-inf")),
    Case("padded batch without gradient", "masks", "pytorch #167515; transformers #40858",
         "no NaN under no_grad with a padded 4-D mask",
         (Problem(mask="padding", mask_shape="B11S", no_grad=True),
          Problem(mask="fully-masked-batch", mask_shape="B1TS", no_grad=True),
          Problem(mask="float-inf", mask_shape="B1TS", no_grad=True, dtype="float16"))),
    Case("a batch element that is all padding", "masks", "pytorch #109517",
         "no NaN, neither there nor in its neighbours", each(mask="fully-masked-batch")),
    Case("the lowest number as a mask", "masks", "pytorch #103749",
         "finfo.min hides, as Transformers writes its masks", each(mask="float-min",
                                                                   mask_shape="B1TS")),
    Case("rows of nothing but the lowest number", "masks", "pytorch #103749",
         "the mean of the values, not NaN and not 0",
         each(mask="float-min-rows", mask_shape="B1TS", no_grad=True)),
    Case("gradients of such rows", "masks", "pytorch #103749, #125674",
         "rows of nothing but finfo.min: log-sum-exp cannot hold what backward needs",
         each(mask="float-min-rows", mask_shape="B1TS")),
    Case("-10000 as a mask", "masks", "mps-flash-attention (threshold)",
         "added as it is", each(("float32", "bfloat16"), mask="float-1e4")),
    Case("NaN in hidden keys", "masks", "pytorch #101967, #103963",
         "NaN in keys and values that no query sees reaches nothing",
         (Problem(mask="padding", mask_shape="B11S", poison=True),
          Problem(mask="padding", mask_shape="11TS", poison=True, dtype="bfloat16"))),
    Case("gradient of an additive mask", "masks", "xformers #636; flash-attention #17",
         "in the mask's own shape: repeated dimensions are summed",
         several("mask_shape", ("BHTS", "1HTS", "TS", "B11S"), mask="float", grads="qkvm")),
    Case("only the mask needs a gradient", "masks", "pytorch #148476",
         "neither a crash nor a missing gradient",
         several("mask_shape", ("BHTS", "1HTS"), mask="float", grads="m")),
    Case("causal and a mask", "masks", "contract",
         "is_causal together with attn_mask: both apply",
         (Problem(causal=True, mask="bool"), Problem(causal=True, mask="float"))),
]

GRADIENTS = [
    Case("only one gradient wanted", "gradients", "contract",
         "q, k or v alone requires a gradient", several("grads", ("q", "k", "v"), causal=True)),
    Case("gradients after a second batch", "gradients", "pytorch #177116",
         "two graphs alive at once do not share state", check=behaviour.two_graphs),
    Case("backward twice", "gradients", "contract",
         "retain_graph: the second backward gives the first one's gradients",
         check=behaviour.backward_twice),
    Case("an input changed before backward", "gradients", "contract",
         "changing q in place between forward and backward raises, or changes nothing",
         check=behaviour.changed_input),
    Case("double backward", "gradients", "pytorch #116350",
         "the gradient of a gradient is right, or refused in words",
         check=behaviour.double_backward),
    Case("forward mode", "gradients", "flash-attention #1672",
         "Jacobian times vector is right, or refused in words", check=behaviour.forward_mode),
    Case("torch.compile", "gradients", "pytorch #150121",
         "compiled without a break, same values and gradients", check=behaviour.compiled),
]

DROPOUT = [
    Case("dropout drops", "dropout", "pytorch #184126; mlx #2732",
         "probabilities are dropped at the rate p, the others multiplied by 1 / (1 - p)",
         check=behaviour.dropout_drops),
    Case("dropout's gradient", "dropout", "first Orchard (O3)",
         "backward uses the very mask that forward drew", check=behaviour.dropout_gradient),
    Case("dropout draws anew", "dropout", "contract",
         "two calls draw two masks, torch.manual_seed brings the first one back",
         check=behaviour.dropout_seed),
    Case("dropout and fully masked rows", "dropout", "pytorch #151667",
         "a mask that hides whole rows, with dropout: no NaN",
         check=behaviour.dropout_fully_masked),
]

BEHAVIOUR = [
    Case("same bits twice", "repeatability", "contract",
         "the same call gives the same bits, output and gradients", check=behaviour.same_bits),
    Case("same bits with fewer threads", "repeatability", "contract",
         "the number of threads changes no bit", check=behaviour.same_bits_threads),
    Case("with and without gradient", "repeatability", "pytorch #167515",
         "no_grad changes the output by no more than the bar", check=behaviour.grad_mode),
    Case("two threads at once", "repeatability", "contract",
         "calls from two Python threads do not disturb each other", check=behaviour.two_threads),
    Case("memory of a training step", "memory", "pytorch #149261, #87090; flash-attention #2603",
         "far less than one score matrix [B,H,T,S]", check=behaviour.training_memory),
    Case("memory over changing lengths", "memory", "pytorch #152550, #188045, #152344",
         "400 training steps of changing length do not add up", check=behaviour.flat_memory),
    Case("elements beyond 2^31 and 2^32", "large", "pytorch #197636, #116769",
         "tensors whose second batch element starts beyond so many elements",
         check=behaviour.far_elements, large=True),
    Case("more than 2^31 scores", "large", "pytorch #149261, #131865, #135598",
         "T x S beyond 2^31 in one head: sampled rows are right", check=behaviour.many_scores,
         large=True),
    Case("gradients of more than 2^32 scores", "large", "pytorch #197636",
         "T x S beyond 2^32 in one head: what sampled rows hand to q, k and v is right",
         check=behaviour.many_scores_backward, large=True),
]

EXTENSIONS = [
    Case("boolean mask and bias", "extensions", "contract",
         "bias is added where attn_mask lets through",
         (Problem(mask="bool", bias="float"),
          Problem(mask="padding", mask_shape="B11S", bias="float", bias_shape="1HTS",
                  grads="qkvm"))),
    Case("causal, bottom right", "extensions", "flash-attention 2.1",
         "causal_alignment: the last query stands at the last key",
         (Problem(causal=True, align="bottom_right", T=19, S=45),
          Problem(causal=True, align="bottom_right", T=45, S=19))),
    Case("sliding window", "extensions", "mlx #3552",
         "window=(left, right), -1 without limit",
         several("window", ((5, 0), (0, 3), (7, 7), (-1, 2), (4, -1), (0, 0))) +
         (Problem(window=(6, 0), causal=True, align="bottom_right", T=20, S=33),)),
    Case("soft cap", "extensions", "contract", "c tanh(s / c)",
         each(softcap=2.0, size=2.0)),
    Case("ALiBi", "extensions", "contract", "slopes for each head",
         each(("float32", "bfloat16"), alibi=True, causal=True, H=4) +
         (Problem(alibi=True, H=4, T=20, S=31, align="bottom_right"),)),
    Case("sinks", "extensions", "contract",
         "a logit that joins the denominator only, and its gradient",
         each(sinks=True, grads="qkvs")
         + (Problem(sinks=True, mask="fully-masked-rows", grads="qkvs"),)),
    Case("key lengths", "extensions", "pytorch #103749",
         "each batch element has its own number of keys, NaN behind them",
         (Problem(B=3, lengths=(37, 5, 0)), Problem(B=3, lengths=(37, 5, 20), poison=True),
          Problem(B=2, T=11, S=40, lengths=(40, 17), causal=True, align="bottom_right"))),
    Case("packed sequences", "extensions", "x-transformers #351; torch-xpu-ops #2390",
         "[total,H,D] with cu_seqlens, sequences do not see each other",
         (Problem(packed=((5, 5), (33, 33), (1, 1), (64, 64)), rank=3),
          Problem(packed=((5, 9), (0, 7), (33, 12)), rank=3, H=4, G=2, causal=True),
          Problem(packed=((5, 9), (20, 31)), rank=3, causal=True, align="bottom_right",
                  dtype="bfloat16"))),
    Case("log-sum-exp", "extensions", "contract",
         "return_lse: natural logarithm, and the gradient through it",
         each(lse=True) + (Problem(lse=True, causal=True, mask="bool"),
                           Problem(lse=True, sinks=True, grads="qkvs"))),
    Case("options together", "extensions", "contract",
         "window, soft cap, ALiBi, bias, sinks and grouped heads in one call",
         (Problem(H=4, G=2, causal=True, window=(12, 0), softcap=5.0, alibi=True, mask="float",
                  sinks=True, lse=True, grads="qkvms", E=40),)),
]

CASES: List[Case] = (VALUES + LENGTHS + LAYOUT + MASKS + GRADIENTS + DROPOUT + BEHAVIOUR +
                     EXTENSIONS)
