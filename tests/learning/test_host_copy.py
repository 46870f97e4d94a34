"""The block of host memory in which a state lies while another process has its device."""

from pathlib import Path

import pytest
import torch

from rlhfless_functions.learning import offload
from rlhfless_functions.learning.host_copy import HostCopy, padded_bytes
from rlhfless_functions.learning.learner import Learner
from tests.learning.jobs import assert_equal, context, job_of

TENSORS = [
    torch.randn(3, 5),
    torch.tensor(7.0),
    torch.randn(2, 3, 4).to(torch.bfloat16),
    torch.arange(9),
    torch.tensor([True, False]),
    torch.empty(0),
]


def test_copies_have_the_tensors_bits_shapes_and_formats_and_a_block_is_used_again() -> None:
    block = HostCopy(sum(map(padded_bytes, TENSORS)))
    for _ in range(2):
        copies = [block.place(tensor) for tensor in TENSORS]
        for copy, tensor in zip(copies, TENSORS, strict=True):
            assert copy.dtype == tensor.dtype and torch.equal(copy, tensor) and copy.shape == tensor.shape
            assert not tensor.nbytes or copy.data_ptr() != tensor.data_ptr()
        places = [copy.data_ptr() for copy in copies if copy.nbytes]
        block.clear()
        assert all(place % 64 == places[0] % 64 for place in places)


def test_a_block_has_room_for_what_it_was_made_for() -> None:
    block = HostCopy(padded_bytes(TENSORS[0]))
    assert block.has_room(TENSORS[0])
    block.place(TENSORS[0])
    assert not block.has_room(TENSORS[3])
    block.clear()
    assert block.has_room(TENSORS[3])


@pytest.mark.usefixtures("warm_start")
def test_a_state_that_was_in_a_block_takes_the_same_steps(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model)
    job.undisturbed(3)
    learner, blocks = Learner(), []

    def in_no_block(tensor: torch.Tensor) -> bool:
        # As on a GPU: what is in the block is on the host already.
        within = [
            block._memory.data_ptr() <= tensor.data_ptr() < block._memory.data_ptr() + block.size for block in blocks
        ]
        return tensor.nbytes > 0 and not any(within)

    monkeypatch.setattr(offload, "_fits", in_no_block)
    for step in (1, 2, 3):
        learner.run(job.request(step, "moved"), context())
        assert learner._state is not None
        place = offload._to_host(learner._state)
        blocks[:] = [learner._state.host_copy]
        offload.relocate(learner._state, place)
        assert_equal(job.published(step, "moved"), job.published(step))
        # And back to memory of its own.
        offload.relocate(learner._state, torch.clone)
        blocks.clear()
