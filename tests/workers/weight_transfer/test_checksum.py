import pytest
import torch

from pearl.workers.weight_transfer.checksum import (
    WeightsHasher,
    canonical_tensors,
    dtype_name,
    model_checksum,
    tensor_bytes,
    weights_checksum,
)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_canonical_tensors_are_sorted_and_tied_weights_come_once() -> None:
    assert [name for name, _ in canonical_tensors(Tied())] == ["embedding.weight", "scale"]


def test_checksum_does_not_depend_on_the_order_of_the_tensors() -> None:
    entries = [("b", "uint8", (2,), b"xy"), ("a", "uint8", (1,), b"z")]
    assert weights_checksum(entries) == weights_checksum(reversed(entries))


@pytest.mark.parametrize(
    "other",
    [
        ("b", "float32", (2,), b"12345678"),
        ("a", "int32", (2,), b"12345678"),
        ("a", "float32", (1, 2), b"12345678"),
        ("a", "float32", (2,), b"12345679"),
    ],
)
def test_checksum_covers_name_dtype_shape_and_bytes(other: tuple[str, str, tuple[int, ...], bytes]) -> None:
    assert weights_checksum([("a", "float32", (2,), b"12345678")]) != weights_checksum([other])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' comes after 'a'"):
        weights_checksum([("a", "uint8", (1,), b"x"), ("a", "uint8", (1,), b"x")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bytes_are_row_major_for_every_dtype_and_layout(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert tensor_bytes(tensor.t().contiguous().t()) == tensor_bytes(tensor)
    assert len(tensor_bytes(torch.ones((), dtype=dtype))) == tensor.element_size()
    assert len(tensor_bytes(torch.ones(0, 3, dtype=dtype))) == 0


def test_pieces_give_the_checksum_of_the_whole() -> None:
    model = Tied()
    hasher = WeightsHasher()
    for name, tensor in canonical_tensors(model):
        hasher.begin(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        data = tensor_bytes(tensor)
        hasher.update(data[:3])
        hasher.update(data[3:])
    assert hasher.hexdigest() == model_checksum(model)
