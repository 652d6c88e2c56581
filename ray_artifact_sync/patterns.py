"""Which paths a user or an owner means: gitignore rules, and Ray's fnmatch lists. Pure.

Single patterns are translated by `pathspec`. How they combine is decided here, because git's own
rule does not suit a library that works on files: git never looks into an ignored directory, so
`logs/` followed by `!logs/keep.txt` keeps nothing. Here the pattern listed last wins, also below a
matched directory; without a negated pattern the outcome is git's.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pathspec import GitIgnoreSpec

from ray_artifact_sync.errors import ConfigurationError

_NONE = -1
"""Decision of a rule list that says nothing about a path; else the deciding pattern's index."""

_MAX_CACHED_DIRS = 65_536


@dataclass(frozen=True)
class PatternSet:
    """Paths selected by gitignore patterns; an immutable value, hashable and picklable.

    A pattern without a slash (`*.tmp`) matches at any depth, one with a slash at its start or in
    its middle (`/summary.json`, `plots/*.png`) is anchored at the root, one with a slash at its end
    (`logs/`) matches directories only, and everything below a matched directory is matched. `!`
    negates: of all patterns that match, the one listed last decides. Case matters.

    Attributes:
        groups: Lists of patterns; a path is matched if one of the lists matches it. A negated
            pattern works within its own list.
    """

    groups: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for group in self.groups:
            for pattern in group:
                _compile(pattern)

    @classmethod
    def of(cls, *patterns: str) -> PatternSet:
        """Builds a set from one list of patterns.

        Args:
            *patterns: gitignore patterns, in order: later ones override earlier ones.

        Raises:
            ConfigurationError: A pattern is malformed, or could never match an artifact path.
        """
        return cls((patterns,) if patterns else ())

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns in order."""
        return tuple(pattern for group in self.groups for pattern in group)

    def matches(self, path: str, is_dir: bool = False) -> str | None:
        """The pattern that selects `path`.

        Args:
            path: Artifact path (relative, POSIX, no slash at the end).
            is_dir: Whether it is a directory.

        Returns:
            The pattern, or None if no pattern selects the path or a negated one released it.
        """
        if self._candidates is None or self._candidates(f"{path}/" if is_dir else path) is None:
            return None
        for rules in self._rules:
            decision = rules.decide(path, is_dir=is_dir)
            if rules.selects(decision):
                return rules.patterns[decision]
        return None

    def matches_dir(self, path: str) -> str | None:
        """The pattern that selects the directory `path` and all that is, or ever will be, below it.

        A scan need not look into such a directory.

        Args:
            path: Artifact path of a directory.

        Returns:
            The pattern, or None if something below may not be selected.
        """
        if self._candidates is None or self._candidates(f"{path}/") is None:
            return None
        for rules in self._rules:
            decision = rules.decide(path, is_dir=True)
            if rules.selects(decision) and not rules.may_release_below(path, decision):
                return rules.patterns[decision]
        return None

    def __or__(self, other: PatternSet) -> PatternSet:
        """The set that matches what either matches."""
        if not isinstance(other, PatternSet):
            return NotImplemented
        # Lists without negation are merged: one list is faster than two, and means the same.
        plain: dict[str, None] = {}
        lists: dict[tuple[str, ...], None] = {}
        for group in self.groups + other.groups:
            if any(pattern.startswith("!") for pattern in group):
                lists[group] = None
            else:
                plain.update(dict.fromkeys(group))
        return PatternSet(((tuple(plain),) if plain else ()) + tuple(lists))

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        if not self.groups:
            return "PatternSet.of()"
        return " | ".join(f"PatternSet.of({', '.join(map(repr, group))})" for group in self.groups)

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups}  # what is compiled stays here: workers compile for themselves

    @functools.cached_property
    def _rules(self) -> tuple[_Rules, ...]:
        return tuple(_Rules(group) for group in self.groups)

    @functools.cached_property
    def _candidates(self) -> Any:
        """One expression for all that any pattern could select: nearly every path ends here."""
        parts = [compiled.search_source for compiled in map(_compile, self.patterns) if not compiled.negated]
        return re.compile("|".join(f"(?:{part})" for part in parts)).match if parts else None


class _Rules:
    """One list of patterns, compiled, with the decisions about the directories seen so far."""

    __slots__ = ("_compiled", "_dirs", "_negated", "patterns")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self._compiled = tuple(map(_compile, patterns))
        self._negated = tuple(i for i, rule in enumerate(self._compiled) if rule.negated)
        self._dirs: dict[str, int] = {}

    def selects(self, decision: int) -> bool:
        return decision != _NONE and not self._compiled[decision].negated

    def decide(self, path: str, *, is_dir: bool) -> int:
        """Index of the deciding pattern, or `_NONE`."""
        parent = path.rpartition("/")[0]
        return self._refine(self._directory(parent) if parent else _NONE, path, is_dir=is_dir)

    def _directory(self, path: str) -> int:
        decision = self._dirs.get(path)
        if decision is not None:
            return decision
        if len(self._dirs) >= _MAX_CACHED_DIRS:
            self._dirs.clear()
        # From the top down in a loop: a path may have more levels than Python's stack.
        decision, end = _NONE, 0
        while end < len(path):
            end = path.find("/", end + 1)
            end = len(path) if end < 0 else end
            prefix = path[:end]
            known = self._dirs.get(prefix)
            if known is None:
                known = self._dirs[prefix] = self._refine(decision, prefix, is_dir=True)
            decision = known
        return decision

    def _refine(self, above: int, path: str, *, is_dir: bool) -> int:
        """The decision on `path`, given the one on its parent directory."""
        lowest = _NONE
        if self.selects(above):
            # Only a negation listed later can change what the directory decided.
            if not self._negated or self._negated[-1] < above:
                return above
            lowest = above
        for index in range(len(self._compiled) - 1, lowest, -1):
            if self._compiled[index].matches_itself(path, is_dir=is_dir):
                return index
        return above

    def may_release_below(self, path: str, decision: int) -> bool:
        """Whether a negation listed after `decision` could match something below `path`."""
        segments = path.split("/")
        return any(
            index > decision and all(a == b for a, b in zip(segments, self._compiled[index].lead, strict=False))
            for index in self._negated
        )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One pattern.

    Attributes:
        regex: pathspec's: it finds a path if the pattern matches the path or a directory above it.
        negated: Whether the pattern starts with `!`.
        any_dir: Whether it is a form of "any directory", for which pathspec has a special
            expression.
        lead: Literal segments that every match starts with.
    """

    regex: re.Pattern[str]
    negated: bool
    any_dir: bool
    lead: tuple[str, ...]

    @property
    def search_source(self) -> str:
        """Source of an expression to be used with `match`, without named groups."""
        source = self.regex.pattern.replace("(?P<ps_d>", "(?:")
        return source if source.startswith("^") else f"(?s:.*?){source}"

    def matches_itself(self, path: str, *, is_dir: bool) -> bool:
        """Whether the pattern matches this very path, rather than a directory above it.

        pathspec marks the slash after a matched directory with the group `ps_d`.
        """
        if self.any_dir:
            return is_dir
        found = self.regex.search(path)
        if found is not None and found.groupdict().get("ps_d") is None:
            return True
        if not is_dir:
            return False
        found = self.regex.search(f"{path}/")
        return found is not None and found.groupdict().get("ps_d") is not None and found.end("ps_d") == len(path) + 1


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> _Compiled:
    body = _check(pattern)
    negated = pattern.startswith("!")
    line = pattern
    if body.endswith("/**/"):
        # "Every directory below": pathspec would take files at the first level, too; git does not.
        line = f"{'!' if negated else ''}{body}*/"
    try:
        (compiled,) = GitIgnoreSpec.from_lines([line]).patterns
    except (ValueError, re.error) as error:
        raise _invalid(pattern, str(error.__cause__ or error)) from error
    if compiled.include is None:
        raise _invalid(pattern, "it has a `[` that is never closed; write `\\[` for the character")
    return _Compiled(
        regex=compiled.regex,
        negated=negated,
        any_dir=body in ("*/", "**/", "/**/", "**/*/", "/**/*/"),
        lead=_literal_lead(body),
    )


def _check(pattern: object) -> str:
    """Returns the pattern without `!` and trailing spaces, if it can match anything at all.

    gitignore accepts lines that match nothing. In an option they are mistakes that would upload, or
    leave out, files silently.
    """
    if not isinstance(pattern, str):
        raise _invalid(pattern, f"a pattern is a string, not {type(pattern).__name__}")
    if "\n" in pattern or "\r" in pattern:
        raise _invalid(pattern, "it has a line break; give one string for each pattern")
    body = pattern if pattern.endswith("\\ ") else pattern.rstrip()
    if body.startswith("#"):
        raise _invalid(pattern, "gitignore takes it for a comment; write `\\#` for the character")
    body = body.removeprefix("!")
    if body.strip() in ("", "/"):
        raise _invalid(pattern, "it matches nothing")
    if body[0].isspace():
        raise _invalid(pattern, "it starts with a space; write `\\ ` for the character")
    if "[:" in body:
        raise _invalid(pattern, "character classes such as `[:alpha:]` are not supported")
    for segment in body.removeprefix("/").removesuffix("/").split("/"):
        if segment in ("", ".", ".."):
            raise _invalid(
                pattern,
                f"it has the segment {segment!r}, which no artifact path has: patterns are "
                "relative to the working dir, and one slash separates two names",
            )
    return body


def _invalid(pattern: object, reason: str) -> ConfigurationError:
    return ConfigurationError(f"Invalid pattern {pattern!r}: {reason}.", pattern=pattern)


def _literal_lead(body: str) -> tuple[str, ...]:
    if "/" not in body[:-1]:
        return ()  # not anchored
    lead: list[str] = []
    for segment in body.strip("/").split("/"):
        if any(char in "*?[\\" for char in segment):
            break
        lead.append(segment)
    return tuple(lead)


@dataclass(frozen=True)
class FnmatchExclude:
    """An `exclude` list of Ray's `sync_up`, with the meaning it has there.

    A file is left out if its own relative path matches one of the fnmatch patterns, whose `*` also
    crosses slashes: `*/checkpoint_*` leaves out `a/checkpoint_1/x/y.txt`, yet not
    `checkpoint_1/z.txt`. A pattern that matches only a directory (`foo`, `foo/`) leaves out no
    file: Ray drops the directory's entry from its listing and still copies, or fails to copy, the
    files below. Here they are simply copied.

    Attributes:
        patterns: fnmatch patterns.
    """

    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if not isinstance(pattern, str):
                raise _invalid(pattern, f"a pattern is a string, not {type(pattern).__name__}")

    @classmethod
    def of(cls, *patterns: str) -> FnmatchExclude:
        """Builds the value from patterns."""
        return cls(patterns)

    def matches(self, path: str, is_dir: bool = False) -> str | None:
        """The first pattern that matches `path`, or None.

        Args:
            path: Artifact path.
            is_dir: Whether it is a directory; then `path + "/"` is tried as well, as Ray does. This
                says nothing about the files below: see `matches_dir`.
        """
        for candidate in (path, f"{path}/") if is_dir else (path,):
            found = self._regex.match(candidate) if self._regex else None
            if found is not None:
                return self.patterns[int((found.lastgroup or "p0")[1:])]
        return None

    def matches_dir(self, path: str) -> str | None:
        """A pattern that matches everything below the directory `path`, or None."""
        # A last `*` takes whatever follows, slashes included.
        for pattern in self.patterns:
            if pattern.endswith("*") and fnmatch.fnmatchcase(f"{path}/", pattern):
                return pattern
        return None

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def __getstate__(self) -> dict[str, Any]:
        return {"patterns": self.patterns}

    @functools.cached_property
    def _regex(self) -> re.Pattern[str] | None:
        if not self.patterns:
            return None
        parts = (f"(?P<p{i}>{fnmatch.translate(p)})" for i, p in enumerate(self.patterns))
        return re.compile("|".join(parts))


Exclude: TypeAlias = PatternSet | FnmatchExclude


@dataclass(frozen=True)
class Selection:
    """What the `include` and `exclude` options select.

    Attributes:
        include: Empty selects everything.
        exclude: Wins over `include`.
    """

    include: PatternSet = field(default_factory=PatternSet)
    exclude: Exclude = field(default_factory=PatternSet)

    @classmethod
    def of(cls, *, include: str | Iterable[str] = (), exclude: str | Iterable[str] = ()) -> Selection:
        """Builds a selection from gitignore patterns.

        Args:
            include: One pattern or several.
            exclude: One pattern or several.

        Raises:
            ConfigurationError: A pattern is invalid.
        """
        return cls(_pattern_set("include", include), _pattern_set("exclude", exclude))

    def reason_to_skip(self, path: str, is_dir: bool = False) -> str | None:
        """Why `path` is not selected, or None if it is.

        Args:
            path: Artifact path.
            is_dir: Whether it is an (empty) directory.
        """
        if self.exclude:
            pattern = self.exclude.matches(path, is_dir)
            if pattern is not None:
                return f"excluded by the pattern {pattern!r}"
        if self.include and self.include.matches(path, is_dir) is None:
            return "not matched by any include pattern"
        return None

    def reason_to_prune(self, path: str) -> str | None:
        """Why nothing below the directory `path` can be selected, or None if something may be."""
        pattern = self.exclude.matches_dir(path) if self.exclude else None
        return None if pattern is None else f"excluded by the pattern {pattern!r}"


def _pattern_set(option: str, patterns: str | Iterable[str]) -> PatternSet:
    if isinstance(patterns, str):
        patterns = (patterns,)
    try:
        return PatternSet.of(*patterns)
    except TypeError as error:
        raise ConfigurationError(f"{option} must be a pattern or several, not {patterns!r}.", option=option) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}", option=option) from error
