"""The three models, out of the wheel of rapidocr-onnxruntime, as the files that configs/ocr.yaml serves.

The detector and the classifier are served as they are. The recogniser ends with the probabilities of 6625 characters per
step, 1 MB for a line of 320 columns, of which only the largest is wanted: the largest and its number become the outputs.

    python -m examples.ocr.models     writes .cache/ocr/
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op

from examples import model_file

PACKAGE = "rapidocr_onnxruntime"
FOLDER = Path(__file__).parents[2] / ".cache" / "ocr"
DETECTOR, CLASSIFIER, RECOGNISER = (
    FOLDER / "detector.onnx",
    FOLDER / "classifier.onnx",
    FOLDER / "recogniser.xml",
)
CHARACTERS = FOLDER / "characters.txt"
_DETECTOR, _CLASSIFIER, _RECOGNISER = (
    "ch_PP-OCRv4_det_infer.onnx",
    "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "ch_PP-OCRv4_rec_infer.onnx",
)


def is_installed() -> bool:
    """Tell whether the package is in this environment."""
    return importlib.util.find_spec(PACKAGE) is not None


def write() -> None:
    """Write the models and the list of characters. Raises `SystemExit` where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: make ocr (Python 3.11 or 3.12)")
    wheel = Path(spec.origin).parent / "models"
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(wheel / _DETECTOR, DETECTOR)
    shutil.copyfile(wheel / _CLASSIFIER, CLASSIFIER)
    recogniser = ov.Core().read_model(wheel / _RECOGNISER)
    # Label 0 is no character, and the last one is the space, as the package adds them.
    names = recogniser.get_rt_info(["framework", "character"]).astype(str).splitlines()
    CHARACTERS.write_text("\n".join(["", *names, " "]), encoding="utf-8")
    model_file.write(_with_labels(recogniser), RECOGNISER)


def _with_labels(recogniser: ov.Model) -> ov.Model:
    """The same graph with `label` i32 [batch, steps] and `likely` f32 [batch, steps] in place of all probabilities."""
    probabilities = recogniser.get_results()[0].input_value(0)
    best = op.topk(probabilities, op.constant(np.int32(1)), 2, "max", "none", index_element_type="i32")
    outputs = []
    for name, port in (("likely", best.output(0)), ("label", best.output(1))):
        squeezed = op.squeeze(port, op.constant(np.array([2])))
        squeezed.output(0).set_names({name})
        outputs.append(op.result(squeezed))
    return ov.Model(outputs, recogniser.get_parameters(), "recogniser")


if __name__ == "__main__":
    write()
