"""Pages, shared prefixes and snapshots: plain integers, no arrays.

A page that is full and committed may be published under the digest of all tokens up to its end. Published
pages form a tree: a page's parent holds the tokens before it. Sequences hold references; a page without
references stays until its room is needed, least recently used first and children before parents.

A snapshot is a copy of one slot's rings at a page border (window keys, open groups, recent tokens). It
belongs to the published page that ends there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_jax.model.state import PAGE

ROOT = b""
"""Digest of the empty prefix."""


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 of a page and everything before it."""
    return hashlib.sha256(parent + np.asarray(token_ids, "<i4").tobytes()).digest()


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A published page. page: its number. references: sequences that hold it. snapshot: number, -1 = none.
    full: the snapshot's decoder windows are good too, not only the encoder's."""

    digest: bytes
    page: int
    parent: Node | None
    references: int = 0
    children: int = 0
    snapshot: int = -1
    full: bool = False


class PageStore:
    """Allocates pages and snapshots of one engine."""

    def __init__(self, pages: int, snapshots: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._nodes: dict[bytes, Node] = {}
        self._leaves: OrderedDict[bytes, Node] = OrderedDict()  # no references, no children: may go, oldest first
        self._idle = 0  # published pages without references
        self._free_snapshots = list(range(snapshots - 1, -1, -1))
        self._snapshots: OrderedDict[int, Node] = OrderedDict()  # least recently used first

    # ---- pages ------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that `take` can give now: free ones and published ones that nobody holds."""
        return len(self._free) + self._idle

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def published(self) -> int:
        return len(self._nodes)

    def take(self, count: int) -> list[int] | None:
        """`count` pages of unknown content, or None if there are not enough."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Take back unpublished pages."""
        self._free.extend(pages)

    def _evict(self) -> None:
        digest, node = self._leaves.popitem(last=False)
        del self._nodes[digest]
        self._idle -= 1
        self._drop_snapshot(node)
        self._free.append(node.page)
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if parent.children == 0 and parent.references == 0:
                self._leaves[parent.digest] = parent
                self._leaves.move_to_end(parent.digest, last=False)  # at least as old as its child

    # ---- prefixes ---------------------------------------------------------------------------------

    def match(self, digests: Sequence[bytes]) -> list[Node]:
        """Published pages of the longest known prefix; digests are those of its pages in order."""
        found = []
        for digest in digests:
            node = self._nodes.get(digest)
            if node is None:
                break
            found.append(node)
        return found

    def hold(self, node: Node) -> None:
        """Count one more sequence that holds the page. Hold parents before children."""
        if node.references == 0:
            self._idle -= 1
            self._leaves.pop(node.digest, None)
        node.references += 1

    def release(self, node: Node) -> None:
        """Count one less. Release children before parents."""
        node.references -= 1
        if node.references == 0:
            self._idle += 1
            if node.children == 0:
                self._leaves[node.digest] = node

    def publish(self, parent: Node | None, digest: bytes, page: int) -> Node:
        """Publish a page that the caller owns; the caller holds the result, whose page may be another one.

        If the same tokens are known already, the known page is used and the caller's is freed: both hold
        the same bits.
        """
        known = self._nodes.get(digest)
        if known is None:
            known = Node(digest, page, parent, references=1)
            self._nodes[digest] = known
            if parent is not None:
                parent.children += 1
            return known
        self.hold(known)
        self._free.append(page)
        return known

    # ---- snapshots --------------------------------------------------------------------------------

    @property
    def keeps_snapshots(self) -> bool:
        return bool(self._free_snapshots or self._snapshots)

    def take_snapshot(self, node: Node, full: bool) -> int | None:
        """Number of a snapshot for this page (the least recently used one goes); None if the engine keeps none."""
        if node.snapshot >= 0:
            number = node.snapshot
        elif self._free_snapshots:
            number = self._free_snapshots.pop()
        elif self._snapshots:
            number, owner = self._snapshots.popitem(last=False)
            owner.snapshot, owner.full = -1, False
        else:
            return None
        node.snapshot, node.full = number, full
        self._snapshots[number] = node
        self._snapshots.move_to_end(number)
        return number

    def touch_snapshot(self, node: Node) -> None:
        self._snapshots.move_to_end(node.snapshot)

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot >= 0:
            del self._snapshots[node.snapshot]
            self._free_snapshots.append(node.snapshot)
            node.snapshot, node.full = -1, False

    # ---- for tests --------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        idle = [node for node in self._nodes.values() if node.references == 0]
        assert len(idle) == self._idle
        assert {node.digest for node in idle if node.children == 0} == set(self._leaves)
        for node in self._nodes.values():
            assert node.references >= 0
            assert node.children == sum(other.parent is node for other in self._nodes.values())
            if node.parent is not None:
                assert node.parent.digest in self._nodes
                assert node.references == 0 or node.parent.references > 0
        owned = [node.page for node in self._nodes.values()]
        assert len(set(owned + self._free)) == len(owned) + len(self._free) <= self.total
        assert {number: node.digest for number, node in self._snapshots.items()} == {
            node.snapshot: node.digest for node in self._nodes.values() if node.snapshot >= 0
        }


def prefix_digests(token_ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Digests of all full pages of a sequence; `known` are its first ones, computed earlier."""
    digests = list(known)
    for page in range(len(digests), len(token_ids) // PAGE):
        parent = digests[-1] if digests else ROOT
        digests.append(page_digest(parent, token_ids[page * PAGE : (page + 1) * PAGE]))
    return digests
