"""The export of PyTorch's models of the zoo, by both of its exporters: run once, by hand, and its files are kept beside it.

    python tests/zoo/export_torch.py tests/zoo/torch       # with torch and onnxscript; no target installs them

Their weights are random, of a fixed seed. Axes have names and bounds, as docs/models.md shows. The detector calls
NonMaxSuppression as torchvision's `nms` does, by an operator of its own, so that torchvision is not needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnxscript
import torch
from onnxscript import opset18 as onnx_ops
from torch import Tensor, nn
from torch.export import Dim

CLASSES, VOCABULARY, HIDDEN = 10, 500, 48
IOU, SCORE, MOST_BOXES = 0.4, 0.55, 100


@torch.library.custom_op("zoo::kept", mutates_args=())
def kept(boxes: Tensor, scores: Tensor) -> Tensor:
    """Rows of (picture, class, box): the best box of those that overlap, for each picture and class."""
    rows = []
    for picture, of_picture in enumerate(scores):
        for number, of_class in enumerate(of_picture):
            left = [int(box) for box in of_class.argsort(descending=True) if of_class[box] > SCORE]
            while left:
                best = left.pop(0)
                rows.append([picture, number, best])
                left = [box for box in left if _overlap(boxes[picture, best], boxes[picture, box]) <= IOU]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _overlap(one: Tensor, other: Tensor) -> float:
    sides = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0)
    areas = [(box[2:] - box[:2]).clamp(min=0).prod() for box in (one, other)]
    both = sides.prod()
    return float(both / (areas[0] + areas[1] - both + 1e-9))


@kept.register_fake
def _(boxes: Tensor, scores: Tensor) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty((rows, 3), dtype=torch.int64)


@onnxscript.script(onnx_ops)
def kept_by_onnx(boxes: onnxscript.FLOAT[...], scores: onnxscript.FLOAT[...]) -> onnxscript.INT64[...]:
    """The same as a node of ONNX."""
    most = onnx_ops.Constant(value_ints=[MOST_BOXES])
    overlap = onnx_ops.Constant(value_floats=[IOU])
    least = onnx_ops.Constant(value_floats=[SCORE])
    return onnx_ops.NonMaxSuppression(boxes, scores, most, overlap, least)


def _kept_of_the_old_exporter(graph: Any, boxes: Any, scores: Any) -> Any:
    constants = [graph.op("Constant", value_t=torch.tensor([value])) for value in (MOST_BOXES, IOU, SCORE)]
    return graph.op("NonMaxSuppression", boxes, scores, *constants)


class Cnn(nn.Module):
    """A classifier of pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        """Probabilities [batch, classes]."""
        return self.layers(image).softmax(-1)


class Detector(nn.Module):
    """Boxes in pictures of 24 x 24: how many, the pictures tell."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 8, 4, 4)
        self.moves, self.logits = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)
        places = torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0))
        self.register_buffer("anchors", torch.cat([places, places + 2], 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (picture, class, anchor) of all pictures, the boxes and their scores."""
        features = self.features(image).relu()
        boxes = self.anchors + 0.4 * self.moves(features).flatten(2).tanh().transpose(1, 2)
        scores = (3 * self.logits(features)).flatten(2).sigmoid()
        selected = torch.ops.zoo.kept(boxes, scores)
        picture, number, anchor = selected.unbind(1)
        return selected, boxes[picture, anchor], scores[picture, number, anchor]


class Layer(nn.Module):
    """Attention and two linear layers. PyTorch's own keeps the example's length where its old exporter traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.joined = nn.Linear(HIDDEN, HIDDEN)
        self.wide = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.before, self.behind = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Hidden states [batch, seq, hidden]; `seen` [batch, 1, 1, seq]: tokens that the mask leaves."""
        asked, known, values = (
            self.heads(self.before(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        found = nn.functional.scaled_dot_product_attention(asked, known, values, attn_mask=seen)
        hidden = hidden + self.joined(found.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.behind(hidden))


class Encoder(nn.Module):
    """A text encoder of two layers, with a mask: the mean over the tokens of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(512, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Vectors [batch, hidden]."""
        hidden = self.words(input_ids) + self.places(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for layer in self.layers:
            hidden = layer(hidden, (attention_mask != 0)[:, None, None])
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def export(folder: Path) -> None:
    """Write all files."""
    torch.manual_seed(7)
    torch.onnx.register_custom_op_symbolic("zoo::kept", _kept_of_the_old_exporter, 18)
    batch = Dim("batch", min=1, max=64)
    side = {2: Dim("height", min=16, max=512), 3: Dim("width", min=16, max=512)}
    seq = Dim("seq", min=1, max=512)
    ids, mask = torch.randint(0, VOCABULARY, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    models: Mapping[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any], list[str]]] = {
        "cnn": (Cnn(), (torch.randn(2, 3, 40, 48),), {"image": {0: batch, **side}}, ["probabilities"]),
        "detector": (
            Detector(),
            (torch.randn(2, 1, 24, 24),),
            {"image": {0: batch}},
            ["selected", "boxes", "scores"],
        ),
        "encoder": (
            Encoder(),
            (ids, mask),
            {"input_ids": {0: batch, 1: seq}, "attention_mask": {0: batch, 1: seq}},
            [
                "sentence_embedding"
            ],  # its own nodes are called `embedding`, and ONNX Runtime takes no name twice
        ),
    }
    for name, (module, example, shapes, outputs) in models.items():
        module.eval()
        torch.onnx.export(
            module,
            example,
            folder / f"{name}.onnx",
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=list(shapes),
            output_names=outputs,
            external_data=False,
            custom_translation_table={torch.ops.zoo.kept.default: kept_by_onnx},
        )
        if name != "cnn":
            torch.onnx.export(
                module,
                example,
                str(folder / f"{name}-legacy.onnx"),
                dynamo=False,
                opset_version=18,
                dynamic_axes={
                    port: {axis: dim.__name__ for axis, dim in axes.items()} for port, axes in shapes.items()
                },
                input_names=list(shapes),
                output_names=outputs,
            )


if __name__ == "__main__":
    export(Path(sys.argv[1]))
