"""The worker processes that a configuration asks for: a role for each, what its process is made of, and which are replaced.

A reload names the roles anew. One whose process would be made of the same keeps its name and its process, wherever its group
stands in the file now. One at the same place keeps its name, and its process is replaced. Others come and go. Pure: what is
read from disk is an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from shapestream.loading.sources import Sources
from shapestream.settings import LoadedSettings, Settings
from shapestream.settings.readers import for_a_process
from shapestream_engine.machine import divide_cpus

Made: TypeAlias = tuple[object, ...]
"""What a process is made of; equal where a new process would be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRole:
    """One configured worker process."""

    group: int
    """The number of its entry of `workers`, from 0."""
    index: int
    """The number of the process in its group, from 0."""
    models: frozenset[str]
    made_of: Made | None
    """None: it cannot be known, so a reload replaces its process."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the file."""
        return self.group, self.index


def roles_of(settings: Settings, cpus: int, sources: Mapping[str, Sources | None]) -> Iterator[WorkerRole]:
    """Yield the roles in the order of the file. `sources`: of the models, by name (`sources_of`)."""
    groups = settings.worker_groups
    processes = max(1, sum(group.count for group in groups))
    for number, group in enumerate(groups):
        own = divide_cpus(cpus, processes, group.slots, group.threads)
        for index in range(group.count):
            models = settings.models_of(group, index)
            found = tuple(sources.get(model.name) for model in models)
            made: Made = (
                own,
                group.wide,
                group.memory_limit,
                settings.server.model_root,
                *map(for_a_process, models),
                *found,
            )
            yield WorkerRole(
                group=number,
                index=index,
                models=frozenset(model.name for model in models),
                made_of=None if None in found else made,
            )


def own_role_of(settings: Settings, cpus: int, sources: Mapping[str, Sources | None]) -> WorkerRole | None:
    """Return what the slots of the server's own process are made of; None where models run in workers."""
    own = settings.in_process
    if own is None:
        return None
    found = tuple(sources.get(model.name) for model in settings.models)
    shared = divide_cpus(cpus, 1, own.slots, own.threads)
    made: Made = (shared, own.wide, settings.server.model_root, *map(for_a_process, settings.models), *found)
    return WorkerRole(
        group=0,
        index=0,
        models=frozenset(model.name for model in settings.models),
        made_of=None if None in found else made,
    )


class Roles:
    """The roles by name, `w0`, `w1` and so on."""

    def __init__(self) -> None:
        self.by_name: dict[str, WorkerRole] = {}
        self._groups: dict[str, int] = {}
        """Groups by name, also of names that were removed: their processes may still end."""

    def copy(self) -> Roles:
        """Return equal roles, which may follow another configuration."""
        other = Roles()
        other.by_name = dict(self.by_name)
        return other

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that a role serves."""
        return frozenset[str]().union(*[role.models for role in self.by_name.values()])

    @property
    def groups(self) -> dict[str, int]:
        """The number of each role's entry of `workers`, by name."""
        return {name: role.group for name, role in self.by_name.items()}

    def group_of(self, name: str) -> int:
        """Return the entry of `workers` that a role has, or had last."""
        return self._groups[name]

    def commands(self, loaded: LoadedSettings, address: str) -> dict[str, list[str]]:
        """Return the command line of each process: the users' own command, with a parent's options."""
        # -P: a file in the current folder must not shadow a module, which -m alone would allow.
        program = [sys.executable, "-P", "-m", "shapestream_workers", "worker", str(loaded.path.absolute())]
        return {
            name: [
                *program,
                *("--connect", address, "--group", str(role.group), "--index", str(role.index)),
                *("--name", name, "--supervised"),
            ]
            for name, role in self.by_name.items()
        }

    def follow(self, wanted: Collection[WorkerRole], doubtful: Collection[str] = ()) -> frozenset[str]:
        """Take these roles in place of the present ones; return those that are new or whose process is to be replaced.

        `doubtful`: names of roles whose present process may be made of something else than was read.
        """
        before = self.by_name
        named = self._named(wanted)
        self.by_name = {name: role for role in wanted for name, known in named.items() if known is role}
        self._groups |= self.groups
        return frozenset(
            name
            for name, role in self.by_name.items()
            if name in doubtful or role.made_of is None or name not in before
            or before[name].made_of != role.made_of
        )  # fmt: skip

    def _named(self, wanted: Collection[WorkerRole]) -> dict[str, WorkerRole]:
        """Return the roles by name: first those that are as they were, then those at the same place, then new ones."""
        free, left, named = dict(self.by_name), list(wanted), dict[str, WorkerRole]()
        for is_same in (_is_unchanged, _is_alike, _is_there):
            for role in [*left]:
                name = next((name for name, old in free.items() if is_same(old, role)), None)
                if name is not None:
                    named[name] = role
                    del free[name]
                    left.remove(role)
        unused = (name for number in count() if (name := f"w{number}") not in self.by_name)
        return named | dict(zip(unused, left, strict=False))


def _is_alike(old: WorkerRole, role: WorkerRole) -> bool:
    return role.made_of is not None and old.made_of == role.made_of


def _is_there(old: WorkerRole, role: WorkerRole) -> bool:
    return old.place == role.place


def _is_unchanged(old: WorkerRole, role: WorkerRole) -> bool:
    return _is_there(old, role) and _is_alike(old, role)
