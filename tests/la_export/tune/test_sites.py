"""Where an adapter adds: what reads a norm, in the later layers."""

from __future__ import annotations

import torch
from torch import nn

from la_export.tune.lookaheads import find_sites


class Norm(nn.Module):
    def forward(self, x):
        return x * 2


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.up, self.gate = nn.Linear(4, 6), nn.Linear(4, 5)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        y = self.norm(x) if self.norm is not None else x + 0
        return x + self.down(self.up(y) + self.gate(y).sum())


class Decoder(nn.Module):
    def __init__(self, num_layers, norm):
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for _ in range(num_layers))

    def forward(self, *, input_ids, use_cache):
        x = torch.ones(*input_ids.shape, 4)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    device = torch.device("cpu")

    def __init__(self, num_layers, norm=None):
        super().__init__()
        self.model = Decoder(num_layers, norm)

    def get_decoder(self):
        return self.model


def test_layers_that_read_a_norm_are_one_site_and_the_first_quarter_has_none():
    sites = find_sites(Model(8, Norm()))
    assert [site.layers for site in sites] == [
        (f"model.layers.{i}.up", f"model.layers.{i}.gate") for i in range(2, 8)
    ]
    assert {(site.sizes, site.width) for site in sites} == {((6, 5), 4)}


def test_few_layers_all_have_sites():
    assert len(find_sites(Model(3, Norm()))) == 3


def test_without_norms_every_input_is_a_site():
    sites = find_sites(Model(1))
    assert [site.layers for site in sites] == [
        ("model.layers.0.up", "model.layers.0.gate"),
        ("model.layers.0.down",),
    ]
