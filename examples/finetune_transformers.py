"""Fine-tuning a Transformers model with attn_implementation="orchard": no downloads.

    python examples/finetune_transformers.py                  a tiny Mistral, random weights
    python examples/finetune_transformers.py --model PATH     a checkpoint's weights

The text is synthetic: sums such as "17+5=22", in this example's own 14 characters whatever the
model's tokenizer, of different lengths, padded on the right for training and on the left for
generation. Neither padding nor the sliding window becomes a T x S
mask: `doctor` shows what each layer does instead.
"""

import argparse
import random
from typing import Dict, List

import torch
import transformers

import orchard.transformers

CHARACTERS = "_0123456789+=."  # "_" pads, "." ends


def encode(texts: List[str], side: str) -> Dict[str, torch.Tensor]:
    """Input ids and attention mask, padded on one side to the longest text."""
    longest = max(map(len, texts))
    padded = [text.ljust(longest, "_") if side == "right" else text.rjust(longest, "_")
              for text in texts]
    ids = torch.tensor([[CHARACTERS.index(c) for c in text] for text in padded])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def decode(ids: torch.Tensor) -> str:
    """A larger vocabulary's other tokens are "?"."""
    return "".join(CHARACTERS[i:i + 1] or "?" for i in ids.tolist()).strip("_")


def sums(count: int, largest: int) -> List[str]:
    pairs = [(random.randint(0, largest), random.randint(0, largest)) for _ in range(count)]
    return [f"{a}+{b}={a + b}." for a, b in pairs]


def build(path: str) -> transformers.PreTrainedModel:
    """The model of a checkpoint, or a small one that knows nothing yet."""
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="orchard")
    config = transformers.MistralConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None,
        eos_token_id=CHARACTERS.index("."))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="orchard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="directory of a checkpoint")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--largest", type=int, default=9, help="largest summand")
    options = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    model = build(options.model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        batch = encode(sums(options.batch, options.largest), "right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps - 1) or (step + 1) % 50 == 0:
            print(f"step {step + 1:4}  loss {loss.item():.4f}")

    model.eval()
    asked = encode([text[:text.index("=") + 1] for text in sums(4, options.largest)], "left")
    for answer in model.generate(**asked, max_new_tokens=4, do_sample=False):
        print("  " + decode(answer))
    print()
    orchard.transformers.doctor(model)


if __name__ == "__main__":
    main()
