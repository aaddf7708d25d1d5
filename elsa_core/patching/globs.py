"""Globs over the paths of sites: what `patch` takes as include and exclude."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from elsa_core.errors import ArgumentError
from elsa_core.patching.sites import AttentionSite


def texts(name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The globs given under a name; empty for none.

    Raises:
        TypeError: they are no text.
    """
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a glob or several, as text, not {given!r}")
    return tuple(found)


def check(sites: Sequence[AttentionSite], what: str, **given: tuple[str, ...]) -> None:
    """A glob that matches nothing is a mistake: the site that it means is not treated as asked.

    Raises:
        ArgumentError: it names the glob.
    """
    for name, globs in given.items():
        for glob in globs:
            if not any(fnmatchcase(site.path, glob) for site in sites):
                raise ArgumentError(
                    f"{name} (--{name}) {glob!r} matches none of the {len(sites)} {what} "
                    f"(the first is {sites[0].path!r})"
                )


def why_left_out(path: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> str | None:
    """Why include and exclude leave a site out; None where they do not."""
    hit = next((glob for glob in exclude if fnmatchcase(path, glob)), None)
    if hit is not None:
        return f"excluded by {hit!r}"
    if include and not any(fnmatchcase(path, glob) for glob in include):
        return "not named by include"
    return None
