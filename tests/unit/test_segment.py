from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from krul_backend.errors import ManifestError
from krul_backend.segment import ModelIdentity, SegmentManifest
from tests.support.store_builders import make_manifest, make_model


def test_equal_models_have_equal_fingerprints() -> None:
    assert make_model().fingerprint == make_model().fingerprint
    assert len(make_model().fingerprint) == 32
    int(make_model().fingerprint, 16)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelIdentity)])
def test_every_field_changes_the_fingerprint(field: str) -> None:
    model = make_model()
    value = getattr(model, field)
    changed = dataclasses.replace(model, **{field: value + ("x" if isinstance(value, str) else 1)})
    assert changed.fingerprint != model.fingerprint


def test_reading_the_fingerprint_does_not_change_it_or_the_identity() -> None:
    model, untouched = make_model(), make_model()
    first = model.fingerprint
    assert model == untouched
    assert hash(model) == hash(untouched)
    assert dataclasses.replace(model).fingerprint == first


def test_sizes_of_a_manifest() -> None:
    manifest = make_manifest("c", 2, 5, (100, 60))
    assert manifest.num_tokens == 12
    assert manifest.num_bytes == 160


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_keys": (), "token_ids": np.zeros(0, np.int64)}, "at least one page"),
        ({"page_keys": ("a", "a", "b")}, "same page twice"),
        ({"page_keys": ("a", "b")}, "2 pages of 4 tokens need 8 token ids, got 12"),
        ({"token_ids": np.zeros(11, np.int64)}, "need 12 token ids, got 11"),
        ({"start_token": -4}, "not a multiple"),
        ({"start_token": 6}, "not a multiple of page size 4"),
        ({"start_token": 0}, "parent_key"),
        ({"parent_key": None}, "exactly the first segment"),
        ({"layer_num_bytes": (100,)}, "1 layer blocks for a model of 2 layers"),
        ({"layer_num_bytes": (100, 0)}, "layer 1 holds 12 tokens in 0 bytes"),
        ({"layer_num_bytes": (100, -1)}, "layer 1 holds 12 tokens in -1 bytes"),
        ({"layer_first_token": (8,)}, "1 first tokens for a model of 2 layers"),
        (
            {"layer_first_token": (8, 7)},
            "layer 1 cannot hold tokens from 7 on in a segment of tokens 8 to 20",
        ),
        ({"layer_first_token": (21, 8)}, "layer 0 cannot hold tokens from 21 on"),
        ({"layer_first_token": (20, 8)}, "layer 0 holds 0 tokens in 100 bytes"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    manifest = make_manifest("c", 2, 5, (100, 60))
    with pytest.raises(ManifestError, match=message):
        dataclasses.replace(manifest, **changes)


def test_every_layer_holds_every_token_unless_said_otherwise() -> None:
    manifest = make_manifest("c", 2, 5, (100, 60))
    assert (manifest.layer_first_token, manifest.end_token) == ((8, 8), 20)
    assert dataclasses.replace(manifest, layer_first_token=(8, 12)).layer_first_token == (8, 12)


def test_a_layer_may_hold_nothing_and_so_may_all() -> None:
    manifest = make_manifest("c", 2, 5, (100, 60))
    some = dataclasses.replace(manifest, layer_first_token=(20, 16), layer_num_bytes=(0, 20))
    assert (some.num_bytes, some.num_tokens) == (20, 12)
    none = dataclasses.replace(manifest, layer_first_token=(20, 20), layer_num_bytes=(0, 0))
    assert (none.num_bytes, none.num_tokens) == (0, 12)


def test_the_first_segment_has_no_parent() -> None:
    manifest = make_manifest("c", 0, 1, (1, 1))
    assert manifest.parent_key is None
    assert isinstance(manifest, SegmentManifest)
