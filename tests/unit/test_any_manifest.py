"""Reading and checking a manifest with any content raises only expected errors, and written
manifests can be read back.
"""

from __future__ import annotations

import yaml
from ddpjob.api.reader import ManifestError, read_manifests, validate
from ddpjob.api.yamltext import read_documents, write_document
from hypothesis import given
from hypothesis import strategies as st

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
_FIELDS = st.sampled_from(
    ["image", "script", "nodes", "env", "storage", "resources", "runPolicy", "podTemplate", "torchrunArgs", "x"]
)


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_no_input_makes_the_reader_raise_an_unexpected_exception(text: str) -> None:
    try:
        read_manifests(text)[0].checked()
    except ManifestError as error:
        assert str(error)


@given(st.dictionaries(_FIELDS, _VALUES))
def test_no_spec_makes_the_checks_raise_an_exception(spec: dict[str, object]) -> None:
    problems = validate({"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "a"}, "spec": spec})
    assert all(p.message for p in problems)


@given(st.text("0123456789eE+-._xobyn:~", max_size=6))
def test_strings_in_a_manifest_stay_strings_for_every_reader(text: str) -> None:
    written = write_document({"args": [text]})
    assert [document.value for document in read_documents(written)] == [{"args": [text]}]
    assert yaml.safe_load(written) == {"args": [text]}
