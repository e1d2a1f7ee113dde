"""`shapestream keys`: make and show the key pairs by which a server and its callers identify themselves.

A secret key is written to its file and is never printed. docs/security.md says which file belongs where.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shapestream.errors import ConfigurationError
from shapestream_workers.exit_status import reported
from shapestream_workers.printing import Json, print_answer

app = typer.Typer(help="Make and show the keys of servers and callers.", no_args_is_help=True)

# A name becomes a file name; it must not lead to another folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@app.command()
def new(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the owner: server, camera-7.", show_default=False),
    ],
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the two files.")] = Path("keys"),
    as_json: Json = False,
) -> None:
    """Make a key pair, and print its public key.

    Writes FOLDER/NAME.secret (mode 0600) and FOLDER/NAME.pub. Existing files are not overwritten.
    """
    with reported(as_json=as_json):
        from shapestream.transport.curve_keys import new_key_pair, write_key_pair

        if not _NAME.fullmatch(name):
            raise ConfigurationError([f"{name!r} cannot name a file (use letters, digits and _ . -)"])
        pair = new_key_pair()
        secret, public = write_key_pair(folder, name, pair)
        files = {"secret_file": str(secret), "public_file": str(public)}
        lines = [
            f"{secret}: the secret key, for {name} alone",
            f"{public}: the public key, for those who must recognise {name}",
            pair.public,
        ]
        print_answer(lines, {"name": name, "public_key": pair.public, **files}, as_json=as_json)


@app.command()
def show(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files .pub or .secret.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Print the public key of each file.

    A secret file that other users could read is refused.
    """
    with reported(as_json=as_json):
        from shapestream.transport.curve_keys import SECRET_SUFFIX, public_key_of, read_key_pair

        found = {
            str(path): read_key_pair(path).public if path.suffix == SECRET_SUFFIX else public_key_of(path)
            for path in files
        }
        print_answer((f"{key}  {path}" for path, key in found.items()), found, as_json=as_json)
