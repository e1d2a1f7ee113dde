"""Files that another party has put in the way: devices, pipes, files without end. No command waits for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.model_file import doubling_model, model_yaml
from tests.e2e.sorter import SORT

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.e2e


def scaling(path: Path, location: str, *, before: bytes = b"", encoding: bytes = b"\x70\x01") -> None:
    """An ONNX file that multiplies by weights in another file.

    `before` stands before the model's fields, and `encoding` says that a tensor's data is elsewhere.
    """
    weights = onnx.TensorProto(name="w", dims=[64], data_type=1)
    weights.external_data.add(key="location", value=location)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "w"], ["y"])],
        "m",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 64])],
    )
    tensor = weights.SerializeToString() + encoding
    whole = graph.SerializeToString() + b"\x2a" + bytes([len(tensor)]) + tensor
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    model.ClearField("graph")
    path.write_bytes(before + model.SerializeToString() + b"\x3a" + _length(whole) + whole)


def _length(data: bytes) -> bytes:
    """In protobuf's encoding."""
    return bytes([len(data) & 0x7F | 0x80, len(data) >> 7])


def refused(workplace: Any, text: str) -> str:
    """The only problem that `check` has with this configuration."""
    ran = workplace.run("check", str(workplace.write(text)))
    assert 3 == ran.returncode, ran.stdout + ran.stderr
    (line,) = ran.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize(
    "location", ["../" * 30 + "dev/zero", "/dev/zero", "../weights", "*/_ORT_MEM_ADDR_/*"], ids=repr
)
def test_weights_outside_the_folder_of_an_onnx_file_are_not_read(workplace: Any, location: str) -> None:
    """A device, a file next door, and an address in the memory of the process."""
    (workplace.folder / "weights").write_bytes(bytes(256))
    (workplace.folder / "models").mkdir()
    scaling(workplace.folder / "models" / "m.onnx", location)
    words = refused(workplace, model_yaml("models/m.onnx"))
    assert "it names tensors in " in words
    assert "outside its folder" in words


def test_serve_ends_where_check_does(workplace: Any) -> None:
    """Neither the server, which digests its models' files, nor a worker waits for the device."""
    scaling(workplace.folder / "m.onnx", "/dev/zero")
    served = workplace.try_serve(model_yaml("m.onnx") + "workers: [{count: 2}]\n")
    assert 3 == served.wait()
    assert "outside its folder" in served.log.read_text()


@pytest.mark.parametrize(
    "disguise",
    [
        {"before": b"\x7b\x08\x01\x7c"},
        {"encoding": b"\x70\x81\x80\x80\x80\x10"},
        {"encoding": b"\x70\x01\x70\x00"},
    ],
    ids=["a group before it", "bits that protobuf drops", "said twice"],
)
def test_no_way_of_writing_hides_the_weights(workplace: Any, disguise: dict[str, bytes]) -> None:
    """A file that engines read as ONNX is read alike by the check."""
    scaling(workplace.folder / "m.onnx", "/dev/zero", **disguise)
    words = refused(workplace, model_yaml("m.onnx"))
    assert "outside its folder" in words


@pytest.mark.parametrize("place", ["pipe", "device", "sparse"])
@pytest.mark.parametrize("kind", ["onnx", "xml"])
def test_weights_that_are_no_ordinary_file_are_not_read(workplace: Any, kind: str, place: str) -> None:
    """A pipe, a link to a device, and a file of an exabyte that takes no room, beside an ONNX file and an IR."""
    if kind == "onnx":
        scaling(workplace.folder / "m.onnx", "weights")
        weights = workplace.folder / "weights"
    else:
        doubling_model(workplace.folder / "m.xml")
        weights = workplace.folder / "m.bin"
        weights.unlink()
    if place == "pipe":
        os.mkfifo(weights)
    elif place == "device":
        weights.symlink_to("/dev/zero")
    else:
        weights.touch()
        os.truncate(weights, 1 << 43)
    words = refused(workplace, model_yaml(f"m.{kind}"))
    assert ("this machine's memory" if place == "sparse" else "is not a regular file") in words


def test_a_model_that_is_a_device_is_refused(workplace: Any) -> None:
    """By its true name."""
    assert "/dev/zero is not a regular file" in refused(workplace, model_yaml("/dev/zero"))


def test_samples_that_are_a_pipe_are_refused(workplace: Any) -> None:
    """They are not opened."""
    doubling_model(workplace.folder / "m.xml")
    (workplace.folder / "samples.npz").touch()
    os.mkfifo(workplace.folder / "pipe.npz")
    os.replace(workplace.folder / "pipe.npz", workplace.folder / "samples.npz")
    words = refused(workplace, model_yaml("m.xml", "    probe: {x: {samples: samples.npz}}\n"))
    assert "samples.npz is not a regular file" in words


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, pytest.param(lambda path: Path(path).symlink_to("/dev/zero"), marks=pytest.mark.thorough)],
    ids=["pipe", "device"],
)
def test_what_is_kept_may_be_anything(workplace: Any, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Pipes or devices in the place of each verdict, cost table, lock and correction: the model is served all the same."""
    for name in ("PROBE", "COST"):
        monkeypatch.setenv(f"SHAPESTREAM_{name}_CACHE", str(workplace.folder / name))
    kept: set[Path] = set()
    config = workplace.write(SORT)
    for round_ in range(2):
        served = workplace.serve(config)
        with served.client() as client:
            client.infer("sort", {"a": [[3.0, 1.0]]})
        served.send(signal.SIGTERM)
        assert 0 == served.wait()
        if round_ == 0:
            kept = {path for name in ("PROBE", "COST") for path in (workplace.folder / name).iterdir()}
            assert {".json", ".lock"} <= {path.suffix for path in kept}
            for path in {*kept, *(path.with_suffix(".tries") for path in kept)}:
                path.unlink(missing_ok=True)
                make(path)
