"""How wrong proposals are, text by text, so that the logits of one text are in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from la_export.tune.groups import NO_TARGET, GroupBlock

__all__ = ["LossKind", "backpropagate", "best_tokens"]

# Half of what a slot is to say is the model's greedy token, half its distribution there.
_GREEDY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """Args:
    until_fail: whether a slot counts as much as the slots before it are likely to be right, as
        when drafts are accepted until one fails.
    """

    until_fail: bool


def backpropagate(
    hidden: torch.Tensor,
    teacher: torch.Tensor,
    head: torch.nn.Module,
    block: GroupBlock,
    kind: LossKind,
) -> float:
    """Send the loss's gradient back from the head into whatever made `hidden`.

    loss = mean over slots with a target of  -sum_t q(t) log p(t),
    q = half the greedy token, half the model's own distribution at the same place (Hinton et al.
    2015, at temperature 1).

    Args:
        hidden: [texts, rows, hidden] what the head reads of the slots, with its history.
        teacher: [texts, columns, hidden] what it read of the texts.
        head: gives logits.
        block: the slots.
        kind: how slots are weighed.

    Returns:
        The loss.
    """
    slots, anchors, targets = (
        torch.from_numpy(array).to(hidden.device)
        for array in (block.slots, block.anchors, block.targets)
    )
    count = int((targets != NO_TARGET).sum())
    gradient = torch.zeros_like(hidden)
    total = 0.0
    for text in range(len(hidden)):
        known = targets[text] != NO_TARGET
        if not known.any():
            continue
        rows = hidden[text, known].detach().requires_grad_()
        place = anchors[text, known] + slots[text, known] + 1  # whose next token is the target
        with torch.no_grad():
            wanted = torch.softmax(head(teacher[text, place]).float(), dim=-1).mul_(
                1 - _GREEDY_SHARE
            )
            wanted[torch.arange(len(wanted)), targets[text, known]] += (
                _GREEDY_SHARE  # one place a row
            )
        scores = torch.log_softmax(head(rows).float(), dim=-1)  # [rows, vocab_size]
        losses = -(wanted * scores).sum(dim=-1)
        if kind.until_fail:
            right = scores.detach().gather(1, targets[text, known].unsqueeze(1)).squeeze(1)
            losses = losses * _reach(right, slots[text, known])
        loss = losses.sum() / count
        loss.backward()
        assert rows.grad is not None, "rows ask for a gradient"
        gradient[text, known] = rows.grad
        total += float(loss.detach())
    hidden.backward(gradient)
    return total


def _reach(log_right: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows] how likely every earlier slot of the row's group is right."""
    before = torch.cat([log_right.new_zeros(1), log_right.cumsum(0)[:-1]])
    rows = torch.arange(len(slots), device=slots.device)
    return torch.exp(before - before[rows - slots])


@torch.no_grad()
def best_tokens(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    """[texts, rows] the token that each slot proposes."""
    return torch.stack([head(rows).argmax(dim=-1) for rows in hidden])
