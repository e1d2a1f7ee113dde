"""Options of ONNX Runtime's execution providers, by the device's name and the bounds of the model.

No card is there: the functions are pure, and a session is asked with what a library with CUDA and TensorRT would be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from shapestream_engine import InputSpec, ModelSpec, SignatureError, compile_model, read_model
from shapestream_engine.backends.onnxruntime.providers import ProviderDevice, cuda_options, trt_profile
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import NamedShape

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
ALL = [TENSORRT, CUDA, CPU]


def port(name: str, shape: str, element_type: str = "f32") -> InputPort:
    """An input."""
    return InputPort(name, element_type, NamedShape.parse(shape))


@pytest.mark.parametrize(
    ("device", "provider", "number"),
    [
        ("CPU", CPU, ""),
        ("cuda", CUDA, ""),
        ("cuda:0", CUDA, "0"),
        ("CUDA:12", CUDA, "12"),
        ("TensorRT:1", TENSORRT, "1"),
    ],
)
def test_a_device_is_a_provider_and_a_card(device: str, provider: str, number: str) -> None:
    """The case does not matter; without a number ONNX Runtime chooses."""
    assert ProviderDevice(provider=provider, number=number) == ProviderDevice.parse(device, ALL)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²"])
def test_other_names_are_no_devices(device: str) -> None:
    """None, which becomes an error that lists the devices."""
    assert ProviderDevice.parse(device, ALL) is None


def test_a_profile_has_the_bounds_of_all_inputs() -> None:
    """Inputs share their dimensions, static axes stand as they are, and a static input has no range."""
    profile = trt_profile(
        [
            port("ids", "batch:1..64, seq:4..400", "i64"),
            port("mask", "batch, seq:..256", "i64"),
            port("pixels", "batch, 3, height:32..512"),
            port("rate", "1"),
        ]
    )
    assert profile == {
        "trt_profile_min_shapes": "ids:1x4,mask:1x4,pixels:1x3x32",
        "trt_profile_opt_shapes": "ids:64x32,mask:64x32,pixels:64x3x128",
        "trt_profile_max_shapes": "ids:64x256,mask:64x256,pixels:64x3x512",
    }


@pytest.mark.parametrize("shape", ["batch:1..8, n:1..7", "batch:..3, n:0..2", "batch:2..2, n:5..6", "n:0..1"])
def test_the_optimal_shape_lies_within_the_range(shape: str) -> None:
    """TensorRT refuses another; and no call has fewer than one element."""
    profile = trt_profile([port("x", shape)])
    least, optimal, most = (
        [int(size) for size in profile[f"trt_profile_{kind}_shapes"].removeprefix("x:").split("x")]
        for kind in ("min", "opt", "max")
    )
    for low, size, high in zip(least, optimal, most, strict=True):
        assert 1 <= low <= size <= high


def test_a_dimension_without_an_upper_bound_is_named() -> None:
    """Of TensorRT alone: CUDA needs no range."""
    inputs = [port("ids", "batch:1..8, seq")]
    with pytest.raises(SignatureError, match=r"'seq' of input 'ids' has no upper bound.*\(seq:1\.\.64\)"):
        trt_profile(inputs)
    assert "use_tf32" in cuda_options(inputs)


def test_a_model_of_one_shape_has_no_profile_and_the_searches_of_cudnn() -> None:
    """Its one shape is timed once, and the arena takes it once."""
    inputs = [port("x", "1, 3, 224, 224")]
    assert ({}, {"use_tf32": "0"}) == (trt_profile(inputs), cuda_options(inputs))


def test_strings_have_no_range() -> None:
    """TensorRT knows no strings, so its nodes begin behind them."""
    inputs = [port("text", "batch:1..8", "str"), port("x", "batch, 4")]
    assert "x:8x4" == trt_profile(inputs)["trt_profile_max_shapes"]


def test_properties_of_a_model_come_last() -> None:
    """One option of three replaces the whole profile: two from here would not fit it."""
    inputs = [port("x", "batch:1..8, 4")]
    cuda = ProviderDevice(provider=CUDA, number="1")
    own = {"use_tf32": "1", "gpu_mem_limit": "1000"}
    assert cuda.running(inputs, own, ALL) == [
        (
            CUDA,
            {
                "device_id": "1",
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
                "use_tf32": "1",
                "gpu_mem_limit": "1000",
            },
        )
    ]
    tensorrt = ProviderDevice(provider=TENSORRT)
    [(_, options)] = tensorrt.running(inputs, {"trt_profile_max_shapes": "x:4x4"}, [TENSORRT, CPU])
    assert {"trt_profile_max_shapes": "x:4x4"} == options


def relu() -> onnx.ModelProto:
    """max(x, 0) over `batch, n`."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "m", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class WithCards:
    """An ONNX Runtime that says it has cards: sessions run on the CPU, and note what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[tuple[str, Mapping[str, str]]]] = []
        monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
        real = ort.InferenceSession

        class Session:
            """A real session on the CPU, by the name of other providers."""

            def __init__(session, source: Any, options: Any, *, providers: Any) -> None:  # noqa: N805
                self.asked.append(providers)
                session.names = [name for name, _ in providers]
                session.real = real(source, options, providers=[CPU])

            def __getattr__(session, name: str) -> Any:  # noqa: N805
                return getattr(session.real, name)

            def get_providers(session) -> list[str]:  # noqa: N805
                return [*session.names, CPU]

        monkeypatch.setattr(ort, "InferenceSession", Session)


def spec(device: str, shape: str = "batch:1..16, n:1..100", **properties: str) -> ModelSpec:
    """The model on a device."""
    return ModelSpec(
        name="m",
        model=relu(),
        engine="onnxruntime",
        device=device,
        inputs={"x": InputSpec(shape=shape)},
        properties=properties,
    )


def test_a_card_gets_options_from_the_bounds_of_the_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read without them first; the model shows what it got."""
    there = WithCards(monkeypatch)
    model = compile_model(spec("cuda:1", **{"provider.gpu_mem_limit": "1000"}))
    reading, running = there.asked
    assert [(CUDA, {"device_id": "1"})] == reading
    assert ["1", "1000", "HEURISTIC"] == [
        running[0][1][name] for name in ("device_id", "gpu_mem_limit", "cudnn_conv_algo_search")
    ]
    assert (CUDA, "1") == (model.properties["provider"], model.properties["provider.device_id"])


def test_tensorrt_gets_the_range_of_the_yaml_and_cuda_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file builds no engine."""
    there = WithCards(monkeypatch)
    compile_model(spec("tensorrt:2"))
    reading, running = there.asked
    assert [CUDA] == [name for name, _ in reading]
    assert [TENSORRT, CUDA] == [name for name, _ in running]
    assert ["x:1x1", "x:16x10", "x:16x100"] == [
        running[0][1][f"trt_profile_{kind}_shapes"] for kind in ("min", "opt", "max")
    ]
    assert ["2", "2"] == [options["device_id"] for _, options in running]


def test_tensorrt_without_bounds_is_refused_but_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`read_model` shows what lacks a bound."""
    WithCards(monkeypatch)
    open_ended = spec("tensorrt", "batch:1..16, n")
    assert "batch:1..16, n" == str(read_model(open_ended).input().shape)
    with pytest.raises(SignatureError, match="model 'm': dimension 'n' of input 'x' has no upper bound"):
        compile_model(open_ended)
