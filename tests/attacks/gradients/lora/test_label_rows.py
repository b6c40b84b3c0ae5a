"""What leaves the last block as a function of an adapter's hidden row, against finite differences of the model."""

import pytest
import torch

from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.attacks.gradients.lora.label_rows import find_label_adapter, label_rows
from unmask.linalg.gap import Gap
from unmask.models.linear import Role
from unmask.protocols import observe_lora

TEXT = (5, 17, 99, 250)


def observe(model, targets):
    return observe_lora(model, [list(TEXT)], rank=4, steps=2, earlier_texts=[[60, 61, 62]], targets=targets)


def forest():
    return Forest({(0, TEXT[:end]): 0.0 for end in range(1, 4)}, [(0, TEXT[:3])], Gap(0.0, 1.0), 3)


@pytest.mark.parametrize(
    ("targets", "role"),
    [
        (("query", "value"), Role.QUERY),
        (("query", "attention_out"), Role.ATTENTION_OUT),
        (("query", "attention_out", "mlp_out"), Role.MLP_OUT),
    ],
)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
def test_the_stream_moves_with_the_hidden_row_as_the_model_says(name, targets, role, request):
    model = request.getfixturevalue(name)
    evidence = observe(model, targets)
    adapter = find_label_adapter(evidence, model)
    assert adapter is not None
    assert adapter.role is role
    trained = model.with_factors(evidence.adapters, evidence.adapter_scale)
    rows = label_rows(trained, forest(), adapter, 2**28)
    last = model.num_blocks - 1
    streams = trained.hidden_states(torch.tensor([TEXT[:3]]))[-1][0]
    every = list(range(3))
    order = [rows.nodes.index((0, TEXT[:end])) for end in (1, 2, 3)]
    torch.testing.assert_close(rows.leave(order, rows.added[order]), streams)
    # One more step of the hidden row is one more column of B in the layer's output.
    moved = rows.added.clone()
    moved[order[2]] += torch.tensor([1e-2, 0, 0, 0])
    layer = trained.body.get_submodule(model.linear(role, last).module)

    def add(module, given, output):
        output = output.clone()
        output[..., -1, :] += 1e-2 * adapter.up[:, 0]
        return output

    hook = layer.register_forward_hook(add)
    by_model = trained.body(torch.tensor([TEXT[:3]])).last_hidden_state[0]
    hook.remove()
    torch.testing.assert_close(trained.final_norm(rows.leave(every, moved))[order], by_model, rtol=1e-3, atol=1e-5)


def test_values_alone_tell_no_labels(tiny_llama):
    assert find_label_adapter(observe(tiny_llama, ("value",)), tiny_llama) is None


def test_a_fused_projection_tells_no_labels(tiny_gpt2):
    assert find_label_adapter(observe(tiny_gpt2, ("query",)), tiny_gpt2) is None
