"""The configuration: a YAML file, read into frozen models that server and workers take as they are."""

from shapestream.settings.document import (
    InProcessSettings,
    LoggingSettings,
    Settings,
    WorkerGroupSettings,
    json_schema,
)
from shapestream.settings.loader import EffectiveValue, LoadedSettings, load_models, load_settings
from shapestream.settings.model_settings import (
    BatchingSettings,
    InputSettings,
    ModelSettings,
    OutputSettings,
    ProbeSettings,
    ShapesSettings,
    registered_functions,
)
from shapestream.settings.server_settings import (
    AdminSettings,
    SecuritySettings,
    ServerSettings,
    is_public_key,
)
from shapestream.settings.yaml_source import Location

__all__ = [
    "AdminSettings",
    "BatchingSettings",
    "EffectiveValue",
    "InProcessSettings",
    "InputSettings",
    "LoadedSettings",
    "Location",
    "LoggingSettings",
    "ModelSettings",
    "OutputSettings",
    "ProbeSettings",
    "SecuritySettings",
    "ServerSettings",
    "Settings",
    "ShapesSettings",
    "WorkerGroupSettings",
    "is_public_key",
    "json_schema",
    "load_models",
    "load_settings",
    "registered_functions",
]
