"""The cache's pages by number: which are free, how many hold each, and which begin of a text is on it."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engines.offload.memory.kv_blocks import PAGE_TOKENS


class PagePool:
    """Pages that are taken, shared and given back. A page that was published keeps its content while it is free, to
    be found by those whose text begins alike, until it is needed; of such pages the longest unused goes first.

    The last `on_disk` of all pages are there; of those that are taken as large a part, to a page, where it can be.
    Source: Kwon et al. 2023 (vLLM), section 4.4, at the grain of a page.
    """

    def __init__(self, pages: int, on_disk: int = 0) -> None:
        self.pages = pages
        self._share = on_disk / max(1, pages)
        self._in_memory = pages - on_disk
        self._holders = [0] * pages
        self._free = (_Free(range(self._in_memory)), _Free(range(self._in_memory, pages)))
        self._content: dict[int, bytes] = {}  # by page, what it was published as
        self._page: dict[bytes, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return sum(map(len, self._free))

    @property
    def taken_on_disk(self) -> int:
        """Pages on disk that somebody holds."""
        return self.pages - self._in_memory - len(self._free[1])

    def take(self, count: int) -> list[int]:
        """`count` free pages. Raises ValueError where there are fewer: the caller makes room first."""
        if count > self.free_pages:
            raise ValueError(f"{count} pages wanted, {self.free_pages} are free")
        taken = []
        for _ in range(count):
            page = self._free[self._next_home()].take()
            if page in self._content:
                del self._page[self._content.pop(page)]
            self._holders[page] = 1
            taken.append(page)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Of each page one holder less."""
        for page in reversed(pages):  # of a text its end is lost first
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page >= self._in_memory].add(page, page in self._content)

    def known(self, names: Iterable[bytes]) -> list[int]:
        """The pages that hold what the first of `names` stand for, up to the first that is nowhere."""
        found = []
        for name in names:
            if (page := self._page.get(name)) is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[int]) -> None:
        """Of each page, found by `known`, one holder more."""
        for page in pages:
            self._holders[page] += 1
            self._free[page >= self._in_memory].kept.pop(page, None)

    def publish(self, page: int, name: bytes) -> None:
        """Says what is on a page that is held; of several pages with the same on them the first is known."""
        if page not in self._content and name not in self._page:
            self._content[page] = name
            self._page[name] = page

    def forget(self) -> None:
        """Nothing that was published is true any more."""
        for free in self._free:
            free.blank += free.kept
            free.kept.clear()
        self._content.clear()
        self._page.clear()

    def _next_home(self) -> int:
        """Where the next page is taken: 0 in memory, 1 on disk."""
        if not self._share:
            return 0
        taken = self.pages - self.free_pages
        wanted = int(self.taken_on_disk + 0.5 < self._share * (taken + 1))
        return wanted if len(self._free[wanted]) else 1 - wanted


class _Free:
    """Free pages: `blank` ones, and `kept` ones with a content, longest unused first."""

    def __init__(self, pages: Iterable[int]) -> None:
        self.blank = list(pages)[::-1]
        self.kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blank) + len(self.kept)

    def take(self) -> int:
        """A blank page, or else the one that was kept longest."""
        return self.blank.pop() if self.blank else self.kept.popitem(last=False)[0]

    def add(self, page: int, keep: bool) -> None:
        """A page that nobody holds any more."""
        if keep:
            self.kept[page] = None
        else:
            self.blank.append(page)


def page_names(tokens: Sequence[int], names: list[bytes], until: int) -> None:
    """Appends to `names`, which has those of the first pages, the names of the full pages of the first `until` tokens.

    A name stands for a page's tokens and all before them.
    """
    for i in range(len(names), until // PAGE_TOKENS):
        part = array("q", tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]).tobytes()
        names.append(hashlib.blake2b((names[-1] if names else b"") + part, digest_size=16).digest())
