"""The models of an answer run as programs that PyTorch has exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tests.e2e.answers.models import (
    BIASES,
    BLOCKS,
    ENCODER,
    EPSILON,
    FINDERS,
    HEADS,
    LARGEST,
    LAYERS,
    ROUNDS,
    SHARPNESS,
    THRESHOLD,
    WIDTH,
)
from torch.export import Dim


class Layers(torch.nn.Module):
    """As the formula."""

    def __init__(self, defect: str | None) -> None:
        super().__init__()
        weights = LAYERS.copy()
        if defect == "weight":
            weights[-1, 0, 0] += 1
        self._fails = defect == "size"
        self.register_buffer("weights", torch.from_numpy(weights))
        self.register_buffer("biases", torch.from_numpy(BIASES))

    def forward(self, x: Any) -> Any:
        """The call."""
        y = x
        for number in range(len(LAYERS)):
            y = torch.clamp(y @ self.weights[number] + self.biases[number] + x, 0, LARGEST)
        if self._fails:  # an index beyond the axis, where it is short
            y = y + 0 * y.index_select(1, torch.tensor([7]))
        return {"y": y}


class Mixing(torch.nn.Module):
    """As the formula."""

    def forward(self, x: Any) -> Any:
        """The call."""
        y = x
        for _ in range(ROUNDS):
            heads = y.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            scores = torch.softmax(heads @ heads.transpose(2, 3) * SHARPNESS, dim=-1)
            mixed = (scores @ heads).transpose(1, 2).flatten(2)
            y = torch.clamp(mixed + x * 0.125, max=LARGEST)
        return {"y": y, "top": y.amax(dim=1)}


class Encoder(torch.nn.Module):
    """As the formula."""

    def __init__(self) -> None:
        super().__init__()
        for role, matrices in ENCODER.items():
            self.register_buffer(role, torch.from_numpy(matrices))

    def forward(self, x: Any) -> Any:
        """The call."""

        def normalised(y: Any) -> Any:
            return torch.nn.functional.layer_norm(y, (WIDTH,), eps=EPSILON)

        def heads(y: Any) -> Any:
            return y.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)

        y = normalised(x)
        for block in range(BLOCKS):
            query, key, value = (heads(y @ each[block]) for each in (self.query, self.key, self.value))
            scores = torch.softmax(query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5, dim=-1)
            y = normalised(y + (scores @ value).transpose(1, 2).flatten(2) @ self.mixed[block])
            y = normalised(y + torch.relu(y @ self.wide[block]) @ self.narrow[block])
        return {"y": y, "mean": y.mean(dim=1)}


class Places(torch.nn.Module):
    """As the formula."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.from_numpy(FINDERS))

    def forward(self, x: Any) -> Any:
        """The call."""
        y = x
        for number in range(len(FINDERS)):
            y = torch.clamp(y @ self.weights[number] + x, 0, LARGEST)
        sums = y.sum(dim=-1)
        places = torch.nonzero(sums > THRESHOLD)
        return {"places": places, "sums": sums[places[:, 0], places[:, 1]]}


def write(folder: Path, *, defect: str | None = None) -> None:
    """The files `NAME.pt2`; defects as for ONNX."""
    dynamic = ({0: Dim("batch", min=1, max=16), 1: Dim("n", min=1, max=256)},)
    modules = {"layers": Layers(defect), "mixing": Mixing(), "encoder": Encoder(), "places": Places()}
    for name, module in modules.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own affairs; the run judges the answers
            program = torch.export.export(module, (torch.ones(5, 9, WIDTH),), dynamic_shapes=dynamic)
            torch.export.save(program, folder / f"{name}.pt2")
