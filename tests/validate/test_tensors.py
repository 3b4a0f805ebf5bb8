from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from deepinfer_cli.validate.tensors import clone_inputs, fingerprint, leaves  # noqa: E402


def test_a_copy_keeps_strides_gaps_and_shared_storage():
    memory = torch.arange(64, dtype=torch.uint8)
    inputs = {
        "pages": torch.as_strided(memory, (3, 4), (20, 1), 3),
        "tail": memory[60:],
        "pair": (torch.zeros(2), None),
        "size": 7,
        "empty": torch.zeros(0, 5),
    }
    copy = clone_inputs(inputs)
    assert copy["pages"].stride() == (20, 1) and copy["pages"].storage_offset() == 3
    assert torch.equal(copy["pages"], inputs["pages"]) and copy["size"] == 7
    assert copy["empty"].shape == (0, 5) and copy["pair"][1] is None
    assert copy["pages"].untyped_storage().data_ptr() == copy["tail"].untyped_storage().data_ptr()
    copy["pages"].fill_(0)
    copy["pair"][0].fill_(1)
    assert int(memory[3]) == 3 and float(inputs["pair"][0].sum()) == 0
    assert torch.equal(copy["pages"].new_empty(0).set_(copy["pages"].untyped_storage())[:3], memory[:3])


def test_leaves_are_the_tensors_in_tuples_too():
    one, two = torch.zeros(1), torch.ones(1)
    assert leaves({"a": one, "out": (two, one), "n": 3, "none": None}) == {
        "a": one,
        "out.0": two,
        "out.1": one,
    }


@pytest.mark.parametrize("change", [(0, 0), (7, 3), (15, 15)])
def test_a_fingerprint_sees_one_changed_element(change):
    tensor = torch.randn(16, 16).to(torch.bfloat16)[:, ::2] if change[1] < 8 else torch.randn(16, 16)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    tensor[change] += 1
    assert fingerprint(tensor) != before


def test_a_fingerprint_sees_swapped_elements():
    assert fingerprint(torch.tensor([1, 2, 3])) != fingerprint(torch.tensor([3, 2, 1]))
    assert fingerprint(torch.tensor(5)) != fingerprint(torch.tensor(6))


def test_a_copy_goes_with_its_last_name():
    """A copy that waited for the garbage collector filled a card's memory with 4 GiB buffers."""
    gc.collect()
    gc.disable()
    try:
        clone_inputs({"x": torch.zeros(8), "pair": (torch.zeros(1), 2)})
        assert gc.collect() == 0
    finally:
        gc.enable()
