"""The section `chains` of the YAML: models that run one after the other as one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.errors import did_you_mean
from shapestream.settings.values import Bytes, Finding, Section, read_list
from shapestream.settings.version_settings import Share, Version
from shapestream.versions import MOST_NAME, NAME


class StageSettings(Section):
    """One stage of a chain: a model, and the origin of its inputs."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", max_length=200)
    """The stage's name, by which other stages name its outputs."""
    model: str
    """The model; a function is one, too."""
    inputs: dict[str, str] = Field(min_length=1)
    """The origin of each input of the model: `STAGE.OUTPUT`, or an input of the chain."""
    each: Annotated[tuple[str, ...], BeforeValidator(read_list, json_schema_input_type=str | list[str])] = (
        Field(default=(), strict=False)
    )
    """`item of STAGE.LIST`: a request per array; `row of STAGE.OUTPUT`: per row; `batch of`: one request that has all.
    Default: one request, which has everything."""
    at_most: int = Field(default=256, ge=1, le=65536)
    """Items or rows of one request of the chain, at most; more are `too_large`."""
    at_most_bytes: Bytes = 64 << 20
    """Bytes of all of them together, at most."""


class ChainSettings(Section):
    """A chain of models that clients ask for like a model."""

    name: str = Field(min_length=1, max_length=MOST_NAME, pattern=f"^{NAME}$")
    """The name that clients use."""
    version: Version | None = None
    """The version; models of one name have different ones. Default: 1."""
    traffic: Share | None = None
    """Share of the requests that name no version: 5%. Default: what the other versions leave."""
    traffic_by: Literal["request", "caller"] | None = None
    """`caller`: all requests of a caller get the same version. Default: `request`, each is drawn by itself."""
    inputs: dict[str, str] = Field(min_length=1)
    """Each input of the chain, and the input of a stage that tells its type: {image: find.image}."""
    stages: tuple[StageSettings, ...] = Field(strict=False, min_length=1)
    """The stages. Each begins when all stages are done whose outputs it takes."""
    outputs: dict[str, str] = Field(min_length=1)
    """Each output of the chain, and the stage's output that it is: {text: read.text}."""
    on_error: Literal["fail", "skip"] = "fail"
    """`fail`: the first row that fails, fails the request. `skip`: the output `STAGE.ok` says which rows have a result."""

    def spec(self) -> ChainSpec:
        """Return the chain as the pipeline takes it."""
        return ChainSpec(
            name=self.name,
            inputs=self.inputs,
            stages=[
                StageSpec(
                    name=stage.name,
                    model=stage.model,
                    inputs=stage.inputs,
                    each=stage.each,
                    at_most=stage.at_most,
                    at_most_bytes=stage.at_most_bytes,
                )
                for stage in self.stages
            ],
            outputs=self.outputs,
            skips=self.on_error == "skip",
        )

    def problems(self, models: Sequence[str]) -> Iterator[Finding]:
        """Yield the mistakes that need no model file to be found. `models`: the names of the configured ones."""
        yield from self.spec().problems()
        for index, stage in enumerate(self.stages):
            if stage.model not in models:
                hint = did_you_mean(stage.model, list(models))
                yield ("stages", index, "model"), f'there is no model "{stage.model}" {hint}'
