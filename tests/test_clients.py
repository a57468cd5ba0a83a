"""`ScoringClient` and `AsyncScoringClient` over replicas that are stand-ins. Real ones: `test_application.py`."""

import pytest

from deployments.catalog import Catalog
from deployments.client import AsyncScoringClient, ScoringClient
from scoring import LabelRead, MatrixRead
from scoring.errors import InvalidRead
from tests.stand_in_replicas import StandInReplica, StandInReplicas
from tests.test_router import CATALOG


@pytest.fixture
def made(monkeypatch):
    """Makes a client of a class."""
    replicas = StandInReplicas(a=StandInReplica(), b=StandInReplica())
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: replicas)
    monkeypatch.setattr("deployments.client._connect", lambda app_name: None)
    monkeypatch.setattr("deployments.router.Catalog", lambda app_name, known: Catalog(app_name, CATALOG))
    return lambda client: client("app")


LABELS = [LabelRead([1] * 100, [i]) for i in range(100)]
BAD = [*LABELS[:3], LabelRead([1], [9999])]


def test_label_reads_are_handed_out_as_they_finish(made):
    with made(ScoringClient) as client:
        seen = dict(client.iter_labels(LABELS))
        assert [seen[i].logprobs.tolist() for i in range(100)] == [[-i] for i in range(100)]
        with pytest.raises(InvalidRead, match="read 3"):
            dict(client.iter_labels(BAD))
        assert isinstance(dict(client.iter_labels(BAD, return_exceptions=True))[3], InvalidRead)


async def test_so_they_are_to_asynchronous_code(made):
    async with made(AsyncScoringClient) as client:
        seen = {i: score async for i, score in client.iter_labels(LABELS)}
        assert [seen[i].logprobs.tolist() for i in range(100)] == [[-i] for i in range(100)]
        seen = {i: score async for i, score in client.iter_labels(BAD, return_exceptions=True)}
        assert isinstance(seen[3], InvalidRead)
        assert (await client.submit(LABELS[7])).logprobs.tolist() == [-7]


def test_a_client_that_is_closed_says_so(made):
    client = made(ScoringClient)
    assert client.submit(LABELS[7]).result(10).logprobs.tolist() == [-7]
    client.close()
    for ask in (
        lambda: client.submit(LABELS[0]),
        lambda: client.read_labels(LABELS),
        lambda: next(client.iter_labels(LABELS)),
        lambda: next(client.iter_matrix([MatrixRead([1], [2])])),
    ):
        with pytest.raises(RuntimeError, match="this client is closed"):
            ask()
