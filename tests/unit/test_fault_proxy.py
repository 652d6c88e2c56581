"""The proxy that other tests break S3 with, itself: a fault that never comes lets every test of it pass."""

from __future__ import annotations

import socket
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.support.fault_proxy import FaultProxy

pytestmark = pytest.mark.s3


def connect(proxy: FaultProxy) -> HTTPConnection:
    return HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=10)


def ask(connection: HTTPConnection) -> int:
    """The status of one request; the connection stays open."""
    connection.request("GET", "/no-such-bucket/key")
    response = connection.getresponse()
    response.read()
    return response.status


def statuses(proxy: FaultProxy, seed: int, requests: int = 200) -> list[int]:
    proxy.dice.seed(seed)
    with closing(connect(proxy)) as connection:
        return [ask(connection) for _ in range(requests)]


def test_a_chance_hits_that_share_of_the_requests_and_the_same_ones_again(proxy):
    rule = proxy.fail(status=503, chance=0.25)
    once = statuses(proxy, seed=7)
    assert 25 <= once.count(503) <= 75
    assert rule.hits == once.count(503)
    assert statuses(proxy, seed=7) == once
    assert statuses(proxy, seed=8) != once


def test_a_chance_ends_after_its_times(proxy):
    proxy.fail(status=503, chance=0.5, times=3)
    assert statuses(proxy, seed=7).count(503) == 3


def test_a_chance_leaves_a_request_to_the_next_rule(proxy):
    proxy.fail(status=503, chance=0.5)
    proxy.fail(status=500)
    assert set(statuses(proxy, seed=7, requests=50)) == {500, 503}


def test_an_outage_ends_what_there_is_and_refuses_what_comes(proxy):
    with closing(connect(proxy)) as kept, closing(connect(proxy)) as later:
        before = ask(kept)
        proxy.go_down()
        with pytest.raises(OSError):  # which of them depends on who notices first
            ask(kept)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((urlsplit(proxy.endpoint).hostname, urlsplit(proxy.endpoint).port), 10)
        proxy.come_back()
        assert ask(later) == before
