"""A file of bases gives back what was saved, or an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, group_vectors, split_vectors
from krul_backend.errors import CodecError
from tests.support.subspace_builders import SHARE, make_bases

SHAPE = LayerShape(2, 4, 6, torch.bfloat16)
TENSORS = (
    "mean",
    "encoder",
    "decoder",
    "outside",
    "shift_costs",
    "magnitudes",
    "attention_means",
    "attention_slopes",
    "attention_levels",
)


def bases(**options: Any) -> ModelBases:
    return make_bases(SHAPE, [2, 1], rank=5, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.bases"
    bases(damage_factor=1.25).save(path)
    return path


@pytest.mark.parametrize("layers_of_group", [1, 5])
def test_shift_sums_say_what_a_common_error_costs(layers_of_group: int) -> None:
    basis = make_bases(LayerShape(2, 32, 32, torch.float32), [layers_of_group], shift_cost=2.0).groups[0]
    costs = torch.rand(basis.shift_costs.shape, generator=torch.Generator().manual_seed(1)) ** 4
    basis = replace(basis, shift_costs=costs)
    errors = torch.randn(50, len(costs), generator=torch.Generator().manual_seed(2))
    exact, found = errors.square() @ costs, basis.shift_sums(errors).square().sum(1)
    if layers_of_group == 1:
        # As many sums as channels.
        torch.testing.assert_close(found, exact)
    ratios = found / exact
    assert ratios.mean() == pytest.approx(1, abs=0.05)
    assert ratios.std() < 0.15


def test_a_file_gives_back_what_was_saved(file: Path) -> None:
    saved, loaded = bases(damage_factor=1.25), ModelBases.load(file)
    assert loaded.digest == saved.digest
    assert loaded.shape == SHAPE
    assert loaded.damage_factor == 1.25
    assert [group.layers for group in loaded.groups] == [range(2), range(2, 3)]
    assert [group.rank for group in loaded.groups] == [5, 5]
    for mine, theirs in zip(saved.groups, loaded.groups, strict=True):
        for name in TENSORS:
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


def test_everything_that_decoding_depends_on_is_in_the_digest() -> None:
    one = bases()
    assert one.digest == bases().digest == one.to(torch.device("cpu")).digest
    digests = {one.digest, bases(seed=1).digest}
    for name in TENSORS:
        changed = getattr(one.groups[1], name).clone()
        changed.view(-1)[0] += 1
        digests.add(ModelBases(SHAPE, (one.groups[0], replace(one.groups[1], **{name: changed}))).digest)
    # As many layers in other groups.
    digests.add(make_bases(SHAPE, [1, 2], rank=5).digest)
    assert len(digests) == 2 + len(TENSORS) + 1
    # What is stored is the same for pools of every element type.
    assert ModelBases(replace(SHAPE, dtype=torch.float16), one.groups).digest == one.digest


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_was_cut_or_changed_is_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    # Half of the places are in the header, though it is the smaller part.
    place = data.draw(
        st.one_of(st.integers(0, header_end - 1), st.integers(header_end, len(whole) - 1)), "place"
    )
    damaged = bytearray(whole)
    if data.draw(st.booleans(), "cut"):
        del damaged[place:]
    else:
        damaged[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    other = file.with_name("damaged.bases")
    other.write_bytes(damaged)
    try:
        found = ModelBases.load(other)
    except CodecError:
        return
    # One kind of white space for another changes nothing.
    assert found.digest == bases(damage_factor=1.25).digest
    assert place < header_end
    assert bytes(whole[place : place + 1]).isspace()


def test_each_bit_of_a_tensor_counts(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    for place in range(len(whole) - 40, len(whole)):
        whole[place] ^= 1
        file.write_bytes(whole)
        with pytest.raises(CodecError, match="damaged"):
            ModelBases.load(file)
        whole[place] ^= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "no file of bases"),
        ({"version": 1}, "version 1, and this program reads version 2: learn them again"),
        ({"heads": 4}, "not float32"),
        ({"group_ends": [3]}, "not float32"),
        ({"group_ends": [2, 2]}, "begins at layer"),
        ({"group_ends": []}, "at least one group"),
        ({"group_ends": None}, "no file of bases"),
        ({"damage_factor": 0}, "damage factor"),
        ({"damage_factor": "nan"}, "damage factor"),
        ({"dtype": "float1"}, "no file of bases"),
        ({"digest": "0"}, "damaged"),
    ],
)
def test_headers_of_another_kind_are_refused(file: Path, changes: dict[str, Any], message: str) -> None:
    with safetensors.safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["krul"])
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors, file, {"krul": json.dumps({**header, **changes})})
    with pytest.raises(CodecError, match=message):
        ModelBases.load(file)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(CodecError, match="no bases in"):
        ModelBases.load(path)
    with pytest.raises(CodecError, match="no bases in"):
        ModelBases.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CodecError, match="no bases in"):
        ModelBases.load(path)
    # A model's weights.
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CodecError, match="no file of bases"):
        ModelBases.load(path)


def test_a_failed_save_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        bases(seed=1).save(file)
    assert ModelBases.load(file).digest == bases(damage_factor=1.25).digest
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("change", ["longer", "fp64"])
def test_tensors_of_other_shapes_or_dtypes_are_refused(name: str, change: str) -> None:
    group = bases().groups[0]
    tensor = getattr(group, name)
    changed = tensor.double() if change == "fp64" else torch.cat([tensor, tensor[:1]])
    with pytest.raises(CodecError, match="not float32"):
        ModelBases(SHAPE, (replace(group, **{name: changed}),))


def test_groups_follow_each_other_from_the_first_layer_on() -> None:
    first, second = bases().groups
    for groups in [(), (second,), (second, first), (first, first)]:
        with pytest.raises(CodecError):
            ModelBases(SHAPE, groups)


@settings(max_examples=30)
@given(
    num_heads=st.integers(1, 3),
    k_dim=st.integers(1, 5),
    v_dim=st.integers(1, 5),
    num_layers=st.integers(1, 3),
)
def test_vectors_of_a_group_are_taken_apart_again(
    num_heads: int, k_dim: int, v_dim: int, num_layers: int
) -> None:
    shape = LayerShape(num_heads, k_dim, v_dim, torch.float32)
    layers = [
        LayerKV(torch.randn(7, num_heads, k_dim), torch.randn(7, num_heads, v_dim)) for _ in range(num_layers)
    ]
    vectors = group_vectors(layers)
    assert vectors.shape == (7, num_layers * num_heads * (k_dim + v_dim))
    for before, after in zip(layers, split_vectors(vectors, shape, num_layers), strict=True):
        assert torch.equal(before.k, after.k)
        assert torch.equal(before.v, after.v)


def test_worth_is_a_sum_of_powers_over_layers_and_heads() -> None:
    group: GroupBasis = replace(
        bases().groups[0],
        attention_slopes=torch.tensor([[1.0, 2.0], [0.0, 0.5]]),
        attention_levels=torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
    )
    # [2 layers, 2 heads, 3 tokens]: of average attention everywhere, four times that, and none in one head.
    relative = torch.tensor([1.0, 4.0, 1.0]).expand(2, 2, 3).clone()
    relative[0, 1, 2] = 0
    worth = group.token_worth(relative * SHARE)
    expected = torch.tensor([1.0, 0.1 * 4 + 0.2 * 16 + 0.3 + 0.4 * 2, 0.8])
    torch.testing.assert_close(worth, expected, rtol=1e-5, atol=0)
