"""Trains small models and writes each as NAME.onnx, with NAME.npz of 1,000 requests: export.py FOLDER.

Run by the Python of `.venv-exporters` (`make test-exporters`), in which no shapestream is. The features have one decimal
and a third of the labels is noise, so that the votes of many requests are equal, or nearly: there the last bit of a sum
decides the label.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
from lightgbm import LGBMClassifier
from onnxmltools.convert.lightgbm.operator_converters.LightGbm import convert_lightgbm
from skl2onnx import to_onnx, update_registered_converter
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from skl2onnx.common.shape_calculator import calculate_linear_classifier_output_shapes
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_classification
from sklearn.ensemble import ExtraTreesClassifier, GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

FEATURES, REQUESTS, SEED = 12, 1000, 0
WORDS = ("red", "green", "blue", "")
MODELS = {
    "forest": lambda: RandomForestClassifier(100, random_state=SEED),
    "extra_trees": lambda: ExtraTreesClassifier(200, max_depth=8, random_state=SEED),
    "gradient_boosting": lambda: GradientBoostingClassifier(n_estimators=100, random_state=SEED),
    "linear": LogisticRegression,
    # With four neighbours a vote may end two to two.
    "neighbours": lambda: KNeighborsClassifier(4),
    "lightgbm": lambda: LGBMClassifier(random_state=SEED, n_jobs=1, verbose=-1),
}
"""Each is trained for two classes and for three."""


def export(folder: Path) -> None:
    """Write every model; the .npz holds `x` and the labels by the library itself, `labels`."""
    update_registered_converter(
        LGBMClassifier,
        "LightGbmLGBMClassifier",
        calculate_linear_classifier_output_shapes,
        convert_lightgbm,
        options={"nocl": [True, False], "zipmap": [True, False, "columns"]},
    )
    for classes in (2, 3):
        x, labels = make_classification(
            1000, FEATURES, n_informative=4, n_classes=classes, flip_y=0.3, random_state=SEED
        )
        x = np.round(x, 1).astype(np.float32)
        requests = np.random.default_rng(SEED).normal(scale=1.5, size=(REQUESTS, FEATURES))
        requests = np.round(requests, 1).astype(np.float32)
        for name, make in MODELS.items():
            # Distances to all known rows take a call of neighbours 10 ms, so it knows fewer.
            known = 200 if name == "neighbours" else len(x)
            model = make().fit(x[:known], labels[:known])
            # A table of scores, not a list of dictionaries.
            proto = to_onnx(model, x[:1], options={"zipmap": False}, target_opset={"": 17, "ai.onnx.ml": 3})
            (folder / f"{name}_{classes}.onnx").write_bytes(proto.SerializeToString())
            np.savez(folder / f"{name}_{classes}.npz", x=requests, labels=model.predict(requests))
    export_pipeline(folder)


def export_pipeline(folder: Path) -> None:
    """Write `pipeline.onnx`: strings `words` [n, 2] and numbers `numbers` [n, 3] to one of three classes."""
    random = np.random.default_rng(SEED)
    words = np.stack([random.choice(WORDS, 400), random.choice(WORDS, 400)], axis=1).astype(object)
    numbers = random.normal(size=(400, 3)).astype(np.float32)
    labels = (numbers.sum(axis=1) + (words[:, 0] == WORDS[0]) > 0).astype(int) + (words[:, 1] == WORDS[1])
    prepared = ColumnTransformer(
        [("words", OneHotEncoder(handle_unknown="ignore"), [0, 1]), ("numbers", StandardScaler(), [2, 3, 4])]
    )
    model = make_pipeline(prepared, LogisticRegression(max_iter=1000))
    model.fit(np.concatenate([words, numbers.astype(object)], axis=1), labels)
    types = [("words", StringTensorType([None, 2])), ("numbers", FloatTensorType([None, 3]))]
    proto = to_onnx(
        model, initial_types=types, options={"zipmap": False}, target_opset={"": 17, "ai.onnx.ml": 3}
    )
    (folder / "pipeline.onnx").write_bytes(proto.SerializeToString())


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # the converters' own
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    export(target)
