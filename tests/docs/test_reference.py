"""The reference shows every public name, and each one's docstring says what its arguments are and has an example."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.docs.pages import DOCS, documented, public_names

SHOWN = set(
    re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("reference/*.md")), re.MULTILINE)
)


def test_every_public_name_is_in_the_reference():
    assert set(public_names()) <= SHOWN


@pytest.mark.parametrize("name", sorted(public_names()))
def test_docstring_has_an_example(name):
    assert re.search(r"^Example:\n", documented()[name], re.MULTILINE)


@pytest.mark.parametrize("name", sorted(public_names()))
def test_docstring_explains_the_arguments(name):
    value = public_names()[name]
    if isinstance(value, type) and (issubclass(value, BaseException) or value.__init__ is object.__init__):
        return
    parameters = inspect.signature(value).parameters.values()
    docstring = documented()[name]
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.VAR_POSITIONAL
        and not re.search(rf"^ +\**{parameter.name}: ", docstring, re.MULTILINE)
    ]
    hidden = {"WorkerArtifacts", "ArtifactSyncMixin", "Collective"}  # nobody calls their constructors
    assert not missing or name.rpartition(".")[2] in hidden, f"{name} does not explain {missing}"
