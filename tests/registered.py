"""A model family outside the repository that is known only within a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from hyvideo.models import registry, versions

_TABLES = (
    registry._FOLDERS,
    registry._MODULES,
    versions._VERSIONS,
    versions.FAMILIES,
    versions.ANNOUNCED,
    versions.RELEASED,
    versions.UNSUPPORTED,
)


@contextmanager
def registered(location: str) -> Iterator[None]:
    """Register the family at a location; every family that is registered within the context is
    unknown afterwards.
    """
    before = [table.copy() for table in _TABLES]
    registry.register(location)
    try:
        yield
    finally:
        if any(table != content for table, content in zip(_TABLES, before)):
            for table, content in zip(_TABLES, before):
                table.clear()
                (table.extend if isinstance(table, list) else table.update)(content)
            registry.packages.cache_clear()
