"""A small Llama and a small GPT-2 of Transformers, trained with everything of torch's that Orchard
can compute switched to it, and without: the losses are the same."""

import copy

import pytest
import torch

T = pytest.importorskip("transformers")
import transformers_models  # noqa: E402

from orchard import switch  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 20


def model(name, attention):
    """Llama with torch's own RMS norm: Transformers' is written out in single operations."""
    torch.manual_seed(3)
    made_by, config = transformers_models.MODELS[name]
    config = config()
    if name == "gpt2":
        config.activation_function = "gelu_pytorch_tanh"
    config._attn_implementation = attention
    made = made_by(config).train()
    for module in list(made.modules()):
        for child_name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                setattr(module, child_name, norm)
    return made


def losses(trained):
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        ids = torch.randint(2, 61, (2, 24), generator=torch.Generator().manual_seed(step % 4))
        loss = trained(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


SERVED = {"llama": {"aten::rms_norm", "aten::silu", "aten::silu_backward"},
          "gpt2": {"aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::gelu",
                   "aten::gelu_backward"}}
SOFTMAX = {"aten::_softmax", "aten::_softmax_backward_data"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SERVED)
def test_losses_are_those_without(name, attention):
    first = model(name, attention)
    second = copy.deepcopy(first)
    want = losses(first)
    assert want[-1] < want[0] - 0.1
    switch.counts(reset=True)
    with switch.enable(all=True):
        have = losses(second)
    served = {what.partition(": ")[0] for what in switch.counts(reset=True)
              if what.endswith(switch.SERVED)}
    rooms = {one.op for one in switch.kernels.replacements()}
    wanted = SERVED[name] | (SOFTMAX if attention == "eager" else set())
    assert not (wanted & rooms) - served and wanted & rooms
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
