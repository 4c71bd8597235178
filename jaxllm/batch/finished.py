"""The set of finished items of a batch, in memory that does not grow with the batch."""


class Finished:
    """A set of item numbers that fills up from 0, each number once.

    It contains all numbers below `low`, and tracks `window` numbers above. Start an item only if
    `has_room` for it: a slow item holds up items that are a window ahead of it.
    """

    def __init__(self, window: int):
        self.low = 0
        self._window = window
        self._ring = bytearray(window)  # of numbers from low on, at number % window

    def __contains__(self, item: int) -> bool:
        return item < self.low or (self.has_room(item) and bool(self._ring[item % self._window]))

    def has_room(self, item: int) -> bool:
        return item < self.low + self._window

    def add(self, item: int) -> None:
        if item in self or not self.has_room(item):
            raise ValueError(f"item {item} cannot be added: low={self.low}")
        self._ring[item % self._window] = 1
        while self._ring[self.low % self._window]:
            self._ring[self.low % self._window] = 0
            self.low += 1
