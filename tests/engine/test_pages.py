"""Page store: references, publication, eviction order, snapshots."""

from __future__ import annotations

import pytest

from deepinfer_jax.engine.pages import ROOT, PageStore, page_digest, prefix_digests
from deepinfer_jax.model.state import PAGE

pytestmark = pytest.mark.fast


def published_chain(store: PageStore, length: int, first: int = 0) -> list:
    """Publish `length` pages of one prefix; the caller holds them."""
    pages = store.take(length)
    assert pages is not None
    nodes, digest = [], ROOT
    for number, page in enumerate(pages):
        digest = page_digest(digest, [first + number] * PAGE)
        nodes.append(store.publish(nodes[-1] if nodes else None, digest, page))
    store.check()
    return nodes


def test_digests_depend_on_everything_before() -> None:
    """Guards sharing: the same page after another prefix is another page."""
    tokens = list(range(3 * PAGE))
    digests = prefix_digests(tokens)
    assert len(set(digests)) == 3
    assert prefix_digests(tokens + [1] * (PAGE - 1)) == digests
    assert prefix_digests(tokens, digests[:1]) == digests
    changed = prefix_digests([9, *tokens[1:]])
    assert not set(changed) & set(digests)


def test_take_is_all_or_nothing() -> None:
    """Guards admission: a request that does not fit must not lose pages half-way."""
    store = PageStore(4, 0)
    assert store.take(5) is None
    assert store.available == 4
    pages = store.take(3)
    assert pages is not None
    assert len(set(pages)) == 3
    assert store.take(2) is None
    store.give(pages)
    assert store.available == 4


def test_eviction_takes_the_oldest_leaf_first() -> None:
    """Guards the cache: a parent outlives its children, and what was used last stays longest."""
    store = PageStore(5, 0)
    first, second = published_chain(store, 3, first=0), published_chain(store, 2, first=100)
    for chain in (first, second):
        for node in reversed(chain):
            store.release(node)
    store.check()
    assert store.available == 5
    assert store.take(1) is not None
    store.check()
    assert [node.digest for node in store.match([n.digest for n in first])] == [n.digest for n in first[:2]]
    assert len(store.match([n.digest for n in second])) == 2
    assert store.take(2) is not None
    assert store.match([n.digest for n in first]) == []
    assert len(store.match([n.digest for n in second])) == 2


def test_held_pages_are_never_evicted() -> None:
    """Guards running sequences against losing their context."""
    store = PageStore(3, 0)
    chain = published_chain(store, 2)
    store.release(chain[1])
    assert store.available == 2
    assert store.take(2) is not None
    assert store.match([chain[0].digest]) == [chain[0]]
    assert store.take(1) is None
    store.check()


def test_publishing_known_tokens_uses_the_known_page() -> None:
    """Guards memory: two sequences that computed the same page end with one."""
    store = PageStore(3, 0)
    [known] = published_chain(store, 1)
    [page] = store.take(1) or [-1]
    again = store.publish(None, known.digest, page)
    assert again is known
    assert known.references == 2
    assert store.free == 2
    store.check()


def test_snapshots_follow_their_page_and_are_reused() -> None:
    """Guards snapshots: the least recently used one goes, and an evicted page takes its own along."""
    store = PageStore(4, 2)
    chain = published_chain(store, 3)
    numbers = [store.take_snapshot(chain[0], True), store.take_snapshot(chain[1], False)]
    assert sorted(n for n in numbers if n is not None) == [0, 1]
    store.touch_snapshot(chain[0])
    assert store.take_snapshot(chain[2], True) == numbers[1]
    assert (chain[1].snapshot, chain[2].snapshot) == (-1, numbers[1])
    assert store.take_snapshot(chain[2], False) == numbers[1]
    assert not chain[2].full
    for node in reversed(chain):
        store.release(node)
    assert store.take(4) is not None
    store.check()
    assert store.published == 0
    assert PageStore(4, 0).take_snapshot(chain[0], True) is None
