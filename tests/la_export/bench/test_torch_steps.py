from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from la_export.bench.gpu.shapes import SMOLLM2_135M
from la_export.bench.torch_steps import Launch, StepModel, make_step_rows, time_steps
from la_runtime.layout import Layout

TINY = replace(
    SMOLLM2_135M,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=128,
    context=64,
)
# Float32 sums in another order.
TOLERANCE = 2e-5


def transformers_model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        max_position_embeddings=TINY.context,
        rope_theta=TINY.rope_theta,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_the_decoder_is_transformers_own(tied: bool) -> None:
    """A text read token block by token block, the past of each block given by its length."""
    truth = transformers_model(tied=tied)
    token_ids = torch.randint(TINY.vocab_size, (12,), generator=torch.Generator().manual_seed(1))
    expected = truth(token_ids[None]).logits[0]
    model = StepModel(
        replace(TINY, is_tied=tied),
        device="cpu",
        dtype=torch.float32,
        past=0,
        most_rows=12,
        weights=dict(truth.state_dict()),
    )
    found = []
    for start in range(0, 12, 4):
        model.past = start
        rows = torch.arange(start, start + 4)
        mask = torch.full((4, start + 4), -1e4)
        mask = mask.masked_fill(torch.arange(start + 4) <= rows[:, None], 0.0)
        found.append(model.forward(token_ids[rows], rows, mask))

    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=TOLERANCE)


def test_steps_have_the_rows_of_the_product() -> None:
    for k in (0, 2, 4):
        for layout in Layout:
            assert make_step_rows(k, layout).num_rows == layout.max_rows(k)


def test_every_kind_of_step_is_timed() -> None:
    model = StepModel(TINY, device="cpu", dtype=torch.float32, past=8, most_rows=9)
    steps = [(0, Layout.ROOT_ONLY), (2, Layout.FULL)]

    times = time_steps(model, steps, launches=[Launch.EAGER], rounds=3)

    assert [(t.k, t.layout, t.rows) for t in times] == [
        (0, Layout.ROOT_ONLY, 1),
        (2, Layout.FULL, 9),
    ]
    assert all(0 < t.best_ms <= t.median_ms for t in times)


def test_the_program_needs_pytorch_and_numpy_alone_and_prints_one_object() -> None:
    program = (
        "import sys\n"
        "from la_export.bench.torch_steps import _main\n"
        "_main(['--device', 'cpu', '--precision', 'fp32', '--layers', '1', '--rounds', '1',\n"
        "       '--past', '4', '--k', '0', '--k', '2'], standalone_mode=False)\n"
        "heavy = {'transformers', 'onnx', 'onnxruntime', 'pydantic', 'safetensors', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    record = json.loads(done.stdout)
    assert [step["rows"] for step in record["steps"]] == [1, 5, 9]
    assert record["read_bytes"] > 4 * 49_152 * 576
    assert done.stderr.splitlines()[-1] == "[]"
