"""A tiny GPT learns to write like this repository's documentation, with and without Orchard.

    python examples/tiny_gpt.py                        about half a minute on two cores
    python examples/tiny_gpt.py --steps 2000 --sample 400
    python examples/tiny_gpt.py --device mps           on a Mac's GPU

The model is plain PyTorch: it calls F.scaled_dot_product_attention and knows nothing of Orchard.
Each setting is trained twice from the same seed, as it is and inside `with orchard.enable()`.
Without dropout both runs must give the same losses. With dropout PyTorch on a CPU has no fused
attention; the two draw different random numbers, so the losses are only alike.
"""

import argparse
import pathlib
import time
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import orchard


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.before_attention(x)).split(width, dim=2))
        seen = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class TinyGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, context: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        """`start` and `count` bytes that the model finds likely after it."""
        ids = torch.tensor(list(start.encode()), device=self.head.weight.device)[None]
        for _ in range(count):
            likely = self(ids[:, -self.context:])[:, -1].div(0.8).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(likely, 1)], dim=1)
        return bytes(ids[0].tolist()).decode("utf-8", "replace")


def text() -> Tensor:
    """The documentation's bytes."""
    pages = sorted(pathlib.Path(__file__).resolve().parents[1].glob("docs/*.md"))
    return torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)),
                            dtype=torch.uint8).long()


def train(data: Tensor, options: argparse.Namespace,
          dropout: float) -> Tuple[TinyGPT, float, float]:
    """The model, the mean loss of the last tenth of the steps, and the seconds of all steps but the
    first, in which memory, threads and kernels are made ready."""
    torch.manual_seed(options.seed)
    model = TinyGPT(options.context, options.width, options.heads, options.layers, dropout)
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Batches come from a generator of their own: dropout must not change what is read.
    reader = torch.Generator().manual_seed(options.seed)
    losses = []
    begin = time.perf_counter()
    for step in range(options.steps):
        if step == 1:
            begin = time.perf_counter()
        at = torch.randint(len(data) - options.context - 1, (options.batch,), generator=reader)
        rows = torch.stack([data[i:i + options.context + 1] for i in at.tolist()])
        rows = rows.to(options.device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, len(losses) // 10):]
    return model, sum(last) / len(last), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 40), ("context", 512), ("batch", 2), ("width", 128),
                        ("heads", 4), ("layers", 3), ("seed", 1), ("sample", 0)):
        parser.add_argument("--" + name, type=int, default=value, help=f"(default {value})")
    parser.add_argument("--device", default="cpu", help="cpu or mps (default cpu)")
    options = parser.parse_args()
    data = text()
    print(f"A GPT of {options.layers} layers reads {len(data)} bytes of documentation: "
          f"{options.steps} steps of {options.batch} x {options.context} bytes, all but the first "
          f"timed, on {options.device}, {torch.get_num_threads()} threads.")
    for dropout in (0.0, 0.1):
        _, loss, seconds = train(data, options, dropout)
        print(f"dropout {dropout}   PyTorch  loss {loss:.6f}   {seconds:6.2f} s")
        with orchard.enable():
            model, loss, seconds = train(data, options, dropout)
        print(f"dropout {dropout}   Orchard  loss {loss:.6f}   {seconds:6.2f} s")
    print("\nWho computed the attention of Orchard's runs:")
    print(orchard.report())
    if options.sample:
        print("\n" + model.eval().write("# Orchard", options.sample))


if __name__ == "__main__":
    main()
