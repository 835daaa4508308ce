"""The pages of the key-value cache: who holds which, and which hold a prefix worth keeping."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from bytetx.errors import InputError

_KEY_BYTES = 16  # of a cryptographic hash: nobody finds a prompt that reads another one's pages


class PageAllocator:
    """Hands out pages by number; every operation on a page takes constant time.

    A page is in one of three states: free (nothing in it is wanted), held (by one or more
    sequences, counted), or kept (held by nobody, but its content is published under a key, and
    may be asked for again).  Kept pages are given away when no free one is left, least recently
    held first.
    """

    def __init__(self, num_pages: int, *, page_size: int):
        """num_pages: pages of every layer's cache.  page_size: tokens a page, a power of two."""
        if num_pages < 1:
            raise InputError(f"num_pages must be at least 1, got {num_pages}")
        if page_size < 1 or page_size & (page_size - 1):
            raise InputError(f"page_size must be a power of two, got {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self._num_holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Pages that nobody holds and that `find` may still give."""
        return len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages, each held once by the caller; at most num_available."""
        assert count <= self.num_available, f"{count} pages of {self.num_available}"
        return [self._take_one() for _ in range(count)]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Published pages of the longest run of keys from the first on, each held once more."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._num_holders[page] == 0:
                del self._kept[page]
            self._num_holders[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Lets `find` give this held page for its key, unless another page has that content."""
        assert self._num_holders[page], f"page {page} is published and not held"
        if key not in self._page_of and self._keys[page] is None:
            self._page_of[key] = page
            self._keys[page] = key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes back what was published of these held pages: their content is not to be trusted."""
        for page in pages:
            self._forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one hold on each page; the pages are one sequence's, in its order.

        The last ones count as the least recently held: without its first page, no later page of a
        prefix can be found.
        """
        for page in reversed(pages):
            self._num_holders[page] -= 1
            assert self._num_holders[page] >= 0, f"page {page} is released and not held"
            if self._num_holders[page]:
                continue
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def forget_kept(self) -> None:
        """Makes free what nobody holds: its content is no longer wanted."""
        for page in self._kept:
            self._forget(page)
        self._free += reversed(self._kept)
        self._kept.clear()

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._num_holders[page] = 1
        return page

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._page_of[key]
            self._keys[page] = None


def page_keys(token_ids: Sequence[int], *, page_size: int, before: bytes = b"") -> Iterator[bytes]:
    """The keys of full pages, one behind the other.

    What a page holds depends on its tokens and on all those before it.  before: the key of the page
    in front of the first, empty where there is none.
    """
    tokens = array("i", token_ids)
    for first in range(0, len(tokens), page_size):
        page = tokens[first : first + page_size].tobytes()
        before = blake2b(before + page, digest_size=_KEY_BYTES).digest()
        yield before
