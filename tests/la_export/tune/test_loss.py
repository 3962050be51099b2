"""The loss in pieces against the loss in one piece."""

from __future__ import annotations

import pytest
import torch

from la_export.tune.groups import NO_TARGET, GroupBlock, pack_groups
from la_export.tune.loss import LossKind, backpropagate, best_tokens
from la_export.tune.texts import OwnText

HIDDEN, VOCAB = 6, 11


def make_case(seed):
    generator = torch.Generator().manual_seed(seed)
    texts = [
        OwnText(token_ids=tuple(torch.randint(VOCAB, (9,), generator=generator).tolist()),
                answered_from=2)
        for _ in range(2)
    ]  # fmt: skip
    block = pack_groups(texts, [[(1, 3), (6, 3), (4, 2)], [(2, 1), (5, 3)]])
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    head.requires_grad_(False)
    hidden = torch.randn(2, block.slots.shape[1], HIDDEN, generator=generator)
    teacher = torch.randn(2, 9, HIDDEN, generator=generator)
    return block, head, hidden, teacher


def naive_loss(block: GroupBlock, head, hidden, teacher, *, until_fail):
    total, count = torch.zeros(()), 0
    for text in range(len(hidden)):
        reach = 1.0
        for row, target in enumerate(block.targets[text]):
            if block.slots[text, row] == 0:
                reach = 1.0
            if target == NO_TARGET:
                continue
            log_shares = torch.log_softmax(head(hidden[text, row]), dim=-1)
            place = block.anchors[text, row] + block.slots[text, row] + 1
            wanted = 0.5 * torch.softmax(head(teacher[text, place]), dim=-1)
            wanted[target] += 0.5
            weight = reach if until_fail else 1.0
            total = total - weight * (wanted * log_shares).sum()
            reach *= float(log_shares[target].detach().exp())
            count += 1
    return total / count


@pytest.mark.parametrize("until_fail", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_give_the_gradient_of_the_whole(seed, until_fail):
    block, head, hidden, teacher = make_case(seed)
    source = hidden.clone().requires_grad_()
    expected = naive_loss(block, head, source * 2, teacher, until_fail=until_fail)
    (expected_gradient,) = torch.autograd.grad(expected, source)

    other = hidden.clone().requires_grad_()
    found = backpropagate(other * 2, teacher, head, block, LossKind(until_fail=until_fail))

    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(other.grad, expected_gradient, rtol=1e-4, atol=1e-6)


def test_the_best_token_is_the_heads():
    _, head, hidden, _ = make_case(0)

    assert torch.equal(best_tokens(hidden, head), head(hidden).argmax(dim=-1))
