"""Pages: none lost, none shared by mistake, the right ones found again."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bytetx.errors import InputError
from bytetx.generate.kv_cache import PageAllocator, page_hashes


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="num_pages must be at least 1, got 0"):
        PageAllocator(0, page_size=16)
    with pytest.raises(InputError, match="page_size must be a power of two, got 12"):
        PageAllocator(4, page_size=12)


def test_a_hash_depends_on_all_tokens_before() -> None:
    first, second = page_hashes([1, 2, 5, 6], page_size=2)
    other, after_other = page_hashes([1, 3, 5, 6], page_size=2)
    assert [first] == list(page_hashes([1, 2], page_size=2)) and first != other
    assert [second] == list(page_hashes([5, 6], page_size=2, parent=first))
    assert second != after_other


def test_what_was_freed_first_is_evicted_first() -> None:
    allocator = PageAllocator(4, page_size=2)
    old, new = allocator.allocate(2), allocator.allocate(2)
    for page in old + new:
        allocator.insert(page, bytes([page]))
    allocator.free(old)
    allocator.free(new)
    allocator.allocate(1)
    assert allocator.find_cached([bytes([old[0]])]) == [old[0]]  # the last page of `old` had to go
    assert allocator.find_cached([bytes([old[1]])]) == []
    assert allocator.find_cached([bytes([page]) for page in new]) == new


def test_invalidated_pages_are_found_by_nobody() -> None:
    allocator = PageAllocator(2, page_size=2)
    pages = allocator.allocate(1)
    allocator.insert(pages[0], b"key")
    allocator.invalidate(pages)
    assert allocator.find_cached([b"key"]) == []
    allocator.free(pages)
    assert (allocator.num_available, allocator.num_cached) == (2, 0)


class Allocation(RuleBasedStateMachine):
    """Random holders against a model of what each page holds."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size=4)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of pages with a hash

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        pages = self.allocator.allocate(data.draw(st.integers(0, self.allocator.num_available)))
        held = {page for holder in self.holders for page in holder}
        assert len(set(pages)) == len(pages) and not held & set(pages)
        for page in pages:
            self.content.pop(page, None)
        self.holders.append(pages)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), key=st.integers(0, 5))
    def insert(self, data: st.DataObject, key: int) -> None:
        page = data.draw(st.sampled_from([p for holder in self.holders for p in holder]))
        self.allocator.insert(page, bytes([key]))
        if page not in self.content and bytes([key]) not in self.content.values():
            self.content[page] = bytes([key])

    @rule(keys=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def find_cached(self, keys: list[int]) -> None:
        pages = self.allocator.find_cached([bytes([key]) for key in keys])
        assert [self.content[page] for page in pages] == [bytes([k]) for k in keys[: len(pages)]]
        if len(pages) < len(keys):
            assert bytes([keys[len(pages)]]) not in self.content.values()
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), invalidates=st.booleans())
    def free(self, data: st.DataObject, invalidates: bool) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if invalidates:
            self.allocator.invalidate(pages)
            for page in pages:
                self.content.pop(page, None)
        self.allocator.free(pages)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.allocator.reset_prefix_cache()
        held = {page for holder in self.holders for page in holder}
        self.content = {page: key for page, key in self.content.items() if page in held}

    @invariant()
    def no_page_is_lost(self) -> None:
        held = {page for holder in self.holders for page in holder}
        assert self.allocator.num_available == self.allocator.num_pages - len(held)
        assert self.allocator.num_cached == len(set(self.content) - held)


TestAllocation = Allocation.TestCase
