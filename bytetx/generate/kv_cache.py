"""The pages of the key-value cache: which sequences use them, and which hold a cached prefix."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from bytetx.errors import InputError

# The hash is cryptographic: nobody finds a prompt that reads another prompt's pages.
_HASH_BYTES = 16


class PageAllocator:
    """Hands out pages by number; every operation on a page takes constant time.

    A page is in one of three states: free (its content is not needed), in use (by one or more
    sequences, counted by references), or cached (used by no sequence, but found by its hash).
    Cached pages are evicted when no free page is left, the least recently used first.
    """

    def __init__(self, num_pages: int, *, page_size: int):
        """num_pages: pages of every layer's cache.  page_size: tokens per page, a power of two."""
        if num_pages < 1:
            raise InputError(f"num_pages must be at least 1, got {num_pages}")
        if page_size < 1 or page_size & (page_size - 1):
            raise InputError(f"page_size must be a power of two, got {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self._ref_counts = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._page_by_hash: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence uses and that `find_cached` can still give."""
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; at most num_available."""
        assert count <= self.num_available, f"{count} pages of {self.num_available}"
        return [self._allocate_one() for _ in range(count)]

    def find_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of known hashes from the first on.

        Each page gets one more reference.
        """
        pages = []
        for page_hash in hashes:
            page = self._page_by_hash.get(page_hash)
            if page is None:
                break
            if self._ref_counts[page] == 0:
                del self._cached[page]
            self._ref_counts[page] += 1
            pages.append(page)
        return pages

    def insert(self, page: int, page_hash: bytes) -> None:
        """Lets `find_cached` find a page in use by its hash, unless another page has this hash."""
        assert self._ref_counts[page], f"page {page} is inserted and not in use"
        if page_hash not in self._page_by_hash and self._hashes[page] is None:
            self._page_by_hash[page_hash] = page
            self._hashes[page] = page_hash

    def invalidate(self, pages: Iterable[int]) -> None:
        """Removes the hashes of pages in use, because their content may be wrong."""
        for page in pages:
            self._remove_hash(page)

    def free(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page; the pages are one sequence's, in its order.

        The last pages count as the least recently used: without its first page, no later page of a
        prefix can be found.
        """
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            assert self._ref_counts[page] >= 0, f"page {page} is freed and not in use"
            if self._ref_counts[page]:
                continue
            if self._hashes[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def reset_prefix_cache(self) -> None:
        """Frees all cached pages: their content is no longer valid."""
        for page in self._cached:
            self._remove_hash(page)
        self._free += reversed(self._cached)
        self._cached.clear()

    def _allocate_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._remove_hash(page)
        self._ref_counts[page] = 1
        return page

    def _remove_hash(self, page: int) -> None:
        page_hash = self._hashes[page]
        if page_hash is not None:
            del self._page_by_hash[page_hash]
            self._hashes[page] = None


def page_hashes(
    token_ids: Sequence[int], *, page_size: int, parent: bytes = b""
) -> Iterator[bytes]:
    """The hashes of full pages, in order.

    The content of a page depends on its tokens and on all tokens before it, so that each hash
    covers the hash of the page before.  parent: the hash of the page before the first one; empty,
    or 16 random bytes that name what else the content depends on, where there is none.
    """
    tokens = array("i", token_ids)
    for first in range(0, len(tokens), page_size):
        page = tokens[first : first + page_size].tobytes()
        parent = blake2b(parent + page, digest_size=_HASH_BYTES).digest()
        yield parent
