"""The module of the gateway's protobuf messages follows its .proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from shapestream.gateway import open_inference_pb2 as protocol

PIPELINE = Path(__file__).parents[3] / "pipeline"
PROTO = "shapestream/gateway/open_inference.proto"


def test_the_module_follows_its_proto(tmp_path: Path) -> None:
    """`make protos` after a change: another protoc finds the same messages in the .proto."""
    found = tmp_path / "found"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PIPELINE}"]
    subprocess.run([*command, f"--descriptor_set_out={found}", PROTO], check=True, cwd=PIPELINE, timeout=120)
    (file,) = FileDescriptorSet.FromString(found.read_bytes()).file
    committed = FileDescriptorSet().file.add()
    protocol.DESCRIPTOR.CopyToProto(committed)
    _without_json_names(file.message_type)
    assert 0 < len(committed.message_type)
    assert file.SerializeToString(deterministic=True) == committed.SerializeToString(deterministic=True)


def _without_json_names(messages: Any) -> None:
    """A set of descriptors has them, a module has not; they follow from the names."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _without_json_names(message.nested_type)


def test_the_module_runs_with_protobuf_6() -> None:
    """Clients such as tritonclient exclude protobuf 7, whose generator writes what 6 refuses."""
    text = Path(protocol.__file__).read_text()
    assert "# Protobuf Python Version: 6." in text
