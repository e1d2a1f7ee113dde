"""`shapestream keys`: makes the key pairs that a protected server and its callers prove themselves with.

A secret is written to its file and shown nowhere; docs/security.md says which file belongs where.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from shapestream.errors import ConfigurationError
from shapestream_workers.exit_status import reported

app = typer.Typer(
    help="Make and show the keys that servers and callers prove themselves with.", no_args_is_help=True
)

# A name becomes a file's; it must not lead elsewhere.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whose keys: server, camera-7.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to put the two files.")] = Path(
        "keys"
    ),
    as_json: Json = False,
) -> None:
    """Write FOLDER/NAME.secret (mode 0600) and FOLDER/NAME.pub; print the public key. Nothing is overwritten."""
    with reported(as_json=as_json):
        from shapestream.transport.curve_keys import new_key_pair, write_key_pair

        if not _NAME.fullmatch(name):
            raise ConfigurationError([f"{name!r} cannot name a file (letters, digits and _ . -)"])
        pair = new_key_pair()
        secret, public = write_key_pair(folder, name, pair)
        if as_json:
            said = {
                "name": name,
                "public_key": pair.public,
                "secret_file": str(secret),
                "public_file": str(public),
            }
            typer.echo(json.dumps(said))
            return
        typer.echo(f"{secret}: the secret, for {name} alone")
        typer.echo(f"{public}: for those who are to recognise {name}")
        typer.echo(pair.public)


@app.command()
def show(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Key files, .pub or .secret.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Print the public key in each file; a secret file that others could read is refused."""
    with reported(as_json=as_json):
        from shapestream.transport.curve_keys import SECRET_SUFFIX, public_key_of, read_key_pair

        found = {
            str(path): read_key_pair(path).public if path.suffix == SECRET_SUFFIX else public_key_of(path)
            for path in files
        }
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            for path, key in found.items():
                typer.echo(f"{key}  {path}")
