"""What all stages have in common: a reference and a launch that are called alike."""

from __future__ import annotations

import inspect

import pytest

import mok_modular as mok
from mok_modular import stages


@pytest.mark.parametrize("name", stages.__all__)
def test_launch_is_called_as_the_reference_is(name: str) -> None:
    module = getattr(mok.stages, name)
    shared = inspect.signature(module.reference).parameters
    own = inspect.signature(module.launch).parameters
    for key, parameter in shared.items():
        assert (own[key].kind, own[key].default) == (parameter.kind, parameter.default), key
    positional = [key for key, parameter in shared.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(own)[: len(positional)] == positional
    # What a kernel wants to know besides has a default.
    for key in own.keys() - shared.keys():
        assert own[key].kind is inspect.Parameter.KEYWORD_ONLY and own[key].default is not inspect.Parameter.empty, key


@pytest.mark.parametrize("name", stages.__all__)
def test_both_say_what_they_do(name: str) -> None:
    module = getattr(stages, name)
    assert "Raises" in (inspect.getdoc(module.reference) or "")
    assert (inspect.getdoc(module.launch) or "").startswith("``reference`` by the compiled ")
