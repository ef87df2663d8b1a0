"""All ranks in one thread."""

import pytest
import torch

from fxpipe.errors import TransportError
from fxpipe.runtime.transport.local import LocalNetwork


def test_messages_pair_by_order_within_a_tag_whichever_end_is_posted_first():
    network = LocalNetwork(2)
    left, right = network.port(0), network.port(1)
    first, second, third = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    early = right.recv([first], 0, 4)
    left.send([torch.tensor([1.0])], 1, 4)
    left.send([torch.tensor([2.0])], 1, 4)
    left.send([torch.tensor([3.0])], 1, 4)
    late = [right.recv([second], 0, 4), right.recv([third], 0, 4)]
    for work in reversed([early, *late]):
        work.wait()
    assert [first.item(), second.item(), third.item()] == [1, 2, 3]


def test_tags_and_directions_do_not_mix():
    network = LocalNetwork(2)
    left, right = network.port(0), network.port(1)
    left.send([torch.tensor(1.0)], 1, 0)
    right.send([torch.tensor(2.0)], 0, 0)
    other_tag = right.recv([torch.zeros(())], 0, 2)
    assert not other_tag.is_completed()
    buffer = torch.zeros(())
    assert right.recv([buffer], 0, 0).is_completed()
    assert buffer.item() == 1


def test_a_receive_is_completed_once_its_own_message_is_there():
    network = LocalNetwork(2)
    left, right = network.port(0), network.port(1)
    works = [right.recv([torch.zeros(1)], 0, 0) for _ in range(2)]
    left.send([torch.ones(1)], 1, 0)
    assert [work.is_completed() for work in works] == [True, False]


def test_a_message_carries_several_tensors_of_any_dtype_and_none():
    network = LocalNetwork(2)
    sent = [torch.tensor([True, False]), torch.tensor(1 + 2j), torch.empty(0, 3)]
    buffers = [torch.empty_like(t) for t in sent]
    network.port(0).send(sent, 1, 0)
    network.port(0).send([], 1, 0)
    network.port(1).recv(buffers, 0, 0).wait()
    network.port(1).recv([], 0, 0).wait()
    assert all(map(torch.equal, sent, buffers))


def test_what_the_receiver_writes_stays_with_the_receiver():
    network = LocalNetwork(2)
    sent, buffer = torch.ones(2), torch.zeros(2)
    network.port(0).send([sent], 1, 0)
    network.port(1).recv([buffer], 0, 0).wait()
    buffer.add_(1)
    assert sent.tolist() == [1, 1]


def test_waiting_for_a_message_that_was_never_sent_names_the_sender_and_the_edge():
    work = LocalNetwork(3).port(2).recv([torch.zeros(1)], 1, 7)
    with pytest.raises(TransportError) as caught:
        work.wait()
    assert str(caught.value) == (
        "rank 2 waits for a message that rank 1 never sent\n  at: edge 3, gradients"
    )


def test_a_send_is_completed_at_once_unless_the_network_is_a_rendezvous():
    assert LocalNetwork(2).port(0).send([torch.ones(1)], 1, 0).is_completed()
    network = LocalNetwork(2, rendezvous=True)
    work = network.port(0).send([torch.ones(1)], 1, 0)
    assert not work.is_completed()
    with pytest.raises(TransportError, match="rank 0 waits for rank 1 to take a message"):
        work.wait()
    network.port(1).recv([torch.zeros(1)], 0, 0)
    assert work.is_completed()
    work.wait()


@pytest.mark.parametrize("buffer", [torch.zeros(2, 4), torch.zeros(1, 4, dtype=torch.float64)])
def test_a_buffer_of_another_shape_or_dtype_is_refused(buffer):
    network = LocalNetwork(2)
    network.port(0).send([torch.zeros(1, 4)], 1, 2)
    with pytest.raises(TransportError, match=r"rank 0 sends .*\(1, 4\).* rank 1 expects"):
        network.port(1).recv([buffer], 0, 2)


def test_after_an_abort_nothing_of_the_failed_step_arrives():
    network = LocalNetwork(2)
    network.port(0).send([torch.ones(1)], 1, 0)
    network.port(1).abort()
    assert not network.port(1).recv([torch.zeros(1)], 0, 0).is_completed()
    assert network.port(1).lost() == ()
