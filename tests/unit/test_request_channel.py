"""What threads send to the daemon arrives, also what a thread sends last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from krul_backend.daemon.client.request_channel import RequestChannels
from krul_backend.daemon.protocol.frames import decode_request
from krul_backend.daemon.protocol.messages import ReleaseRequest


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def in_new_threads(num_threads: int, channels: RequestChannels) -> None:
    """Each of them posts a release, and ends before the next one begins."""
    for lease_id in range(num_threads):
        request = ReleaseRequest(lease_id=lease_id)
        thread = threading.Thread(target=channels.post, args=(request,))
        thread.start()
        thread.join()


def test_a_release_arrives_though_its_thread_ended_before_it_was_sent(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/requests"
    channels = RequestChannels(context, endpoint)
    in_new_threads(3, channels)
    with context.socket(zmq.ROUTER) as daemon:
        daemon.bind(endpoint)
        lease_ids = []
        while len(lease_ids) < 3 and daemon.poll(10_000):
            _, frame = daemon.recv_multipart()
            request = decode_request(frame)
            assert isinstance(request, ReleaseRequest)
            lease_ids.append(request.lease_id)
    channels.close()
    assert lease_ids == [0, 1, 2]


def test_threads_that_come_and_go_share_a_socket(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/requests"
    channels = RequestChannels(context, endpoint)
    with context.socket(zmq.ROUTER) as daemon:
        daemon.bind(endpoint)
        in_new_threads(20, channels)
        senders = set()
        for _ in range(20):
            assert daemon.poll(10_000)
            senders.add(daemon.recv_multipart()[0])
    channels.close()
    assert len(senders) == 1
