"""Which driver component owns which files in a trial dir. Pure; knows Ray's classes by name only.

A worker never pushes or pulls a file that an owner declares: the owner writes it from the driver,
and the worker's copy, if there is one, is something else.
"""

from __future__ import annotations

import functools
import string
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.patterns import PatternSet

_DEFAULT = (
    ("Ray", ("/error.txt", "/error.pkl")),
    ("CSVLoggerCallback", ("/progress.csv",)),
    ("JsonLoggerCallback", ("/result.json", "/params.json", "/params.pkl")),
    # Only at the root: a user's own SummaryWriter in a subdirectory makes artifacts.
    ("TBXLoggerCallback", ("/events.out.tfevents.*",)),
    ("WandbLoggerCallback", ("/wandb/",)),
    # Ray's MLflow, Comet and Aim callbacks are left out on purpose: they write to the driver's
    # working directory or the experiment dir, never into trial dirs. A `mlruns/` or `.aim/` there
    # was made by the trainable itself, and is an artifact.
)

_declared: dict[type | str, tuple[str, ...]] = {}
_declared_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a path.

    Attributes:
        name: For example `"CSVLoggerCallback"`.
        pattern: The declared pattern that matched, as an anchored gitignore rule.
    """

    name: str
    pattern: str


@dataclass(frozen=True, repr=False)
class ArtifactRegistry:
    """Owners and the patterns they write in trial dirs; an immutable, picklable value.

    Patterns are gitignore rules (see `PatternSet`) with one difference: callbacks write into the
    trial dir's root, so a plain name means the root. `summary.json` is `/summary.json`, `*.png` is
    `/*.png`, `logs/` is `/logs/` and everything below it; `**/summary.json` says any depth. A
    negated pattern (`!logs/keep.txt`) releases a path of the same owner only.

    Attributes:
        owners: Name and anchored patterns of each owner, in order. Where two own a path, the first
            is named.

    Example:
        ```python
        from ray_artifact_sync import ArtifactRegistry

        registry = ArtifactRegistry.default().with_owner("nightly job", "nightly/", "!nightly/notes.txt")
        assert registry.owner_of("nightly/report.html").name == "nightly job"
        assert registry.owner_of("nightly/notes.txt") is None
        assert registry.owner_of("progress.csv").name == "CSVLoggerCallback"
        ```
    """

    owners: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def default(cls) -> ArtifactRegistry:
        """What Ray and the loggers that it adds to every run write, and `wandb/`."""
        return cls(_DEFAULT)

    @classmethod
    def from_callbacks(cls, callbacks: Iterable[Any] | None) -> ArtifactRegistry:
        """The default registry, and what the callbacks of a run declare.

        A callback declares the files that it writes into trial dirs with `artifact_patterns` (a
        string or several, on the class or the instance, or a property), with Ray's own
        `_SAVED_FILE_TEMPLATES`, or is declared by somebody else with `declare`. All of these count,
        in the order templates, `declare`, `artifact_patterns`. Two callbacks of one class with
        different patterns are two owners.

        Args:
            callbacks: Instances or classes; containers such as Ray's `CallbackList` are unpacked.

        Raises:
            ConfigurationError: A declaration cannot be read or is invalid; the message names the
                callback.
        """
        registry = cls.default()
        for callback in _flatten(callbacks):
            registry = _add_callback(registry, callback)
        return registry

    @classmethod
    def declare(cls, callback_class: type | str, *patterns: str) -> None:
        """Declares, for this process, what somebody else's callback class writes into trial dirs.

        Call it before the registry is built on the driver. Subclasses are covered. Declaring again
        adds.

        Args:
            callback_class: The class, or its qualified name (`"package.module.Class"`), which needs
                no import.
            *patterns: What it writes.

        Raises:
            ConfigurationError: A pattern is invalid, there is none, or the class is not one.
        """
        if not isinstance(callback_class, (type, str)) or (
            isinstance(callback_class, str) and "." not in callback_class.strip(".")
        ):
            raise ConfigurationError(
                f"A callback class is a class or a name like 'package.module.Class', not {callback_class!r}."
            )
        if not patterns:
            raise ConfigurationError(f"No patterns were declared for {callback_class!r}.")
        name = callback_class if isinstance(callback_class, str) else callback_class.__name__
        anchored = _anchor_all(name, patterns)
        with _declared_lock:
            _declared[callback_class] = _merge(_declared.get(callback_class, ()), anchored)

    def with_owner(self, name: str, *patterns: str) -> ArtifactRegistry:
        """A registry with one more owner, or with more patterns of an owner it has.

        Args:
            name: Who writes.
            *patterns: What it writes; without any, nothing changes.

        Raises:
            ConfigurationError: A pattern is invalid, or the name is empty.
        """
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"An owner's name is a non-empty string, not {name!r}.")
        if not patterns:
            return self
        owners = dict(self.owners)
        owners[name] = _merge(owners.get(name, ()), _anchor_all(name, patterns))
        return ArtifactRegistry(tuple(owners.items()))

    def owner_of(self, path: str, is_dir: bool = False) -> Owner | None:
        """Who owns `path`; the first in order if several do.

        Args:
            path: Artifact path.
            is_dir: Whether it is a directory.
        """
        if self._all.matches(path, is_dir) is None:
            return None
        for name, patterns in self._sets:
            pattern = patterns.matches(path, is_dir)
            if pattern is not None:
                return Owner(name, pattern)
        return None

    def owner_of_dir(self, path: str) -> Owner | None:
        """Who owns the directory `path` and all that is below it: a scan need not look inside."""
        for name, patterns in self._sets:
            pattern = patterns.matches_dir(path)
            if pattern is not None:
                return Owner(name, pattern)
        return None

    @functools.cached_property
    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        """Owner to its anchored patterns, in order."""
        return MappingProxyType(dict(self.owners))

    def __iter__(self) -> Iterator[str]:
        return iter(self.patterns)

    def __len__(self) -> int:
        return len(self.owners)

    def __repr__(self) -> str:
        owners = ", ".join(f"{name}: {' '.join(patterns)}" for name, patterns in self.owners)
        return f"ArtifactRegistry({owners})"

    def __getstate__(self) -> dict[str, Any]:
        return {"owners": self.owners}

    @functools.cached_property
    def _sets(self) -> tuple[tuple[str, PatternSet], ...]:
        return tuple((name, PatternSet.of(*patterns)) for name, patterns in self.owners)

    @functools.cached_property
    def _all(self) -> PatternSet:
        """One set for "owned by anyone": most paths are owned by no one, and need one look only."""
        return functools.reduce(lambda a, b: a | b, (s for _, s in self._sets), PatternSet())


def _has_negation(patterns: Iterable[str]) -> bool:
    return any(pattern.startswith("!") for pattern in patterns)


def _merge(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    # Of two equal patterns the later one stays: a negation may stand between them.
    return tuple(reversed(dict.fromkeys(reversed(old + new))))


def _anchor_all(owner: str, patterns: Iterable[str]) -> tuple[str, ...]:
    try:
        return tuple(map(_anchor, patterns))
    except ConfigurationError as error:
        raise ConfigurationError(f"{owner}: {error}", owner=owner) from error


def _anchor(pattern: str) -> str:
    PatternSet.of(pattern)  # as written: `/#x` would hide that `#x` is a comment
    negation, body = ("!", pattern[1:]) if pattern.startswith("!") else ("", pattern)
    if body.startswith(("/", "**/")):
        return pattern
    return f"{negation}/{body}"


# --- reading callbacks ----------------------------------------------------------------------


def _flatten(callbacks: Any) -> Iterator[Any]:
    """Every callback, the containers' contents after the container itself."""
    if callbacks is None:
        return
    if getattr(callbacks, "IS_CALLBACK_CONTAINER", False):
        callbacks = (callbacks,)
    try:
        pending = list(callbacks)[::-1]
    except TypeError as error:
        raise ConfigurationError(f"callbacks must be several callbacks, not {callbacks!r}.") from error
    seen: set[int] = set()
    while pending:
        callback = pending.pop()
        if callback is None or id(callback) in seen:
            continue
        seen.add(id(callback))
        yield callback
        inner = None if isinstance(callback, type) else _own_attributes(callback).get("_callbacks")
        if isinstance(inner, (list, tuple)):
            pending.extend(reversed(inner))


def _own_attributes(value: Any) -> Mapping[str, Any]:
    """The instance's own attributes, without running any of its code."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, Mapping) else {}


def _add_callback(registry: ArtifactRegistry, callback: Any) -> ArtifactRegistry:
    patterns = _patterns_of(callback)
    if not _has_negation(patterns):
        # Known already, for example from a subclass of a logger that the default names.
        known = {p for _, ps in registry.owners if not _has_negation(ps) for p in ps}
        patterns = tuple(pattern for pattern in patterns if pattern not in known)
    if not patterns or any(patterns == other for _, other in registry.owners):
        return registry
    # Never merged into an owner of the same name: a negation must not reach the other's patterns.
    base = name = _name_of(callback)
    number = 1
    while name in registry.patterns:
        number += 1
        name = f"{base} ({number})"
    return ArtifactRegistry((*registry.owners, (name, patterns)))


def _patterns_of(callback: Any) -> tuple[str, ...]:
    name = _name_of(callback)
    templates = tuple(map(_from_template, _read(callback, "_SAVED_FILE_TEMPLATES")))
    declared = _declared_for(callback if isinstance(callback, type) else type(callback))
    own = _anchor_all(name, _read(callback, "artifact_patterns"))
    return _merge(_anchor_all(name, templates), declared + own)


def _declared_for(cls: type) -> tuple[str, ...]:
    with _declared_lock:
        declared = dict(_declared)
    patterns: tuple[str, ...] = ()
    for base in reversed(cls.__mro__):  # bases first: a subclass may negate
        qualified = f"{base.__module__}.{base.__qualname__}"
        patterns = _merge(patterns, declared.get(qualified, ()) + declared.get(base, ()))
    return patterns


def _read(callback: Any, attribute: str) -> tuple[str, ...]:
    """The strings that the callback's attribute holds, none if it has no such attribute."""
    name = _name_of(callback)
    where = f"{attribute} of the callback {name}"
    on_class = callback if isinstance(callback, type) else type(callback)
    defined = any(attribute in vars(base) for base in on_class.__mro__)
    try:
        value = getattr(callback, attribute)
    except Exception as error:
        if isinstance(error, AttributeError) and not defined:
            return ()
        raise ConfigurationError(f"Reading {where} failed: {error!r}.", callback=name) from error
    if isinstance(value, property):
        raise ConfigurationError(
            f"{where} is a property, which only an instance can answer. Pass an instance.",
            callback=name,
        )
    if value is None:
        return ()
    try:
        values = (value,) if isinstance(value, str) else tuple(value)
    except Exception as error:  # an iterable may run the callback's code, too
        raise ConfigurationError(
            f"Reading {where} failed: {error!r}. It must be a string or several.", callback=name
        ) from error
    for item in values:
        if not isinstance(item, str):
            raise ConfigurationError(f"{where} has {item!r}, which is not a string.", callback=name)
    return values


def _from_template(template: str) -> str:
    """Ray's templates are names or globs; a format field (`run-{}.csv`) stands for any text."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return template
    return "".join(text + ("" if name is None else "*") for text, name, _, _ in parts)


def _name_of(callback: Any) -> str:
    cls: type = callback if isinstance(callback, type) else type(callback)
    return cls.__name__
