"""The configuration: a YAML file, read into frozen models that server and workers take as they are."""

from shapestream.settings.chain_settings import ChainSettings
from shapestream.settings.document import (
    InProcessSettings,
    Settings,
    WorkerGroupSettings,
    json_schema,
)
from shapestream.settings.loader import LoadedSettings, load_models, load_settings, settings_of
from shapestream.settings.model_settings import (
    BatchingSettings,
    ModelSettings,
    OutputSettings,
    ProbeSettings,
    ShapesSettings,
    TokenizerSettings,
)
from shapestream.settings.model_sources import registered_functions
from shapestream.settings.server_settings import (
    AdminSettings,
    GatewaySettings,
    GrpcSettings,
    HttpSettings,
    ServerSettings,
)
from shapestream.settings.text_folder import TextFolder
from shapestream.settings.yaml_source import Location

__all__ = [
    "AdminSettings",
    "BatchingSettings",
    "ChainSettings",
    "GatewaySettings",
    "GrpcSettings",
    "HttpSettings",
    "InProcessSettings",
    "LoadedSettings",
    "Location",
    "ModelSettings",
    "OutputSettings",
    "ProbeSettings",
    "ServerSettings",
    "Settings",
    "ShapesSettings",
    "TextFolder",
    "TokenizerSettings",
    "WorkerGroupSettings",
    "json_schema",
    "load_models",
    "load_settings",
    "registered_functions",
    "settings_of",
]
