"""The rules by which processors choose the size of an image. Both sides become whole numbers of
tokens."""

import math

import msgspec

_MOST_UNEQUAL = 200  # how many times longer than the other an edge may be, where areas are limited


class UndecodableError(ValueError):
    """Why there is no picture in a file."""


class LongestEdge(msgspec.Struct, frozen=True, tag=True):
    """Pixtral's: an image keeps its size, unless its longest edge is above this."""

    pixels: int

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of an image, for tokens of so many pixels a side."""
        ratio = max(height, width) / self.pixels
        if ratio > 1:
            height, width = int(height / ratio), int(width / ratio)
        if not height or not width:
            raise UndecodableError("one edge is so much longer than the other that nothing is left")
        return -(-height // side) * side, -(-width // side) * side

    def max_tokens(self, side: int) -> int:
        """The tokens of the largest image."""
        return (-(-self.pixels // side)) ** 2


class Square(msgspec.Struct, frozen=True, tag=True):
    """Gemma's: every image becomes a square, whatever its edges are."""

    pixels: int

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        return self.pixels, self.pixels

    def max_tokens(self, side: int) -> int:
        return (self.pixels // side) ** 2


class Tiles(msgspec.Struct, frozen=True, tag=True):
    """InternVL's: an image becomes square tiles side by side, in a grid that is about as wide for
    its height as the image. If there are several, the whole image is one more, behind them."""

    pixels: int  # of a tile's edge
    min_tiles: int
    max_tiles: int

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of all tiles together."""
        best, least = (1, 1), math.inf
        for columns, rows in self._grids():
            away = abs(width / height - columns / rows)
            # Of grids alike, the larger one is for images that fill half of it.
            fills = 2 * width * height > self.pixels**2 * columns * rows
            if away < least or (away == least and fills):
                best, least = (columns, rows), away
        return best[1] * self.pixels, best[0] * self.pixels

    def max_tokens(self, side: int) -> int:
        most = max(columns * rows for columns, rows in self._grids())
        return (most + (most > 1)) * (self.pixels // side) ** 2

    def _grids(self) -> list[tuple[int, int]]:
        """The columns and rows of grids, those of fewer tiles first; transformers goes through them
        in this order, which decides between equals."""
        edges = range(1, self.max_tiles + 1)
        found = [(columns, rows) for columns in edges for rows in edges]
        found = [one for one in found if self.min_tiles <= one[0] * one[1] <= self.max_tiles]
        return sorted(found, key=math.prod)


class Area(msgspec.Struct, frozen=True, tag=True):
    """Qwen's: an image keeps its size, unless its area is below or above these numbers of pixels.
    Its edges are rounded as Python does it: halves to even numbers."""

    min_pixels: int
    max_pixels: int

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of an image, for tokens of so many pixels a side."""
        if max(height, width) > _MOST_UNEQUAL * min(height, width):
            raise UndecodableError(f"one edge is more than {_MOST_UNEQUAL} times the other")
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            by = math.sqrt(height * width / self.max_pixels)
            rows, columns = (
                max(side, math.floor(edge / by / side) * side) for edge in (height, width)
            )
        elif rows * columns < self.min_pixels:
            by = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(edge * by / side) * side for edge in (height, width))
        return rows, columns

    def frame_size(self, num_frames: int, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of each frame of a video, which are as those of an image."""
        return self.size(height, width, side)

    def max_tokens(self, side: int) -> int:
        """No image has more tokens: not one that is made smaller to a single row of tokens, nor
        one whose edges are rounded up."""
        in_row = math.sqrt(_MOST_UNEQUAL * self.max_pixels) / side
        smallest, longest = math.sqrt(self.min_pixels) / side, math.sqrt(_MOST_UNEQUAL)
        rounded_up = smallest**2 + smallest * (longest + 1 / longest) + 1
        return math.floor(max(self.max_pixels / side**2, in_row, rounded_up))


class TotalArea(msgspec.Struct, frozen=True, tag=True):
    """Qwen3-VL's for videos: as `Area`, of all frames together."""

    min_pixels: int
    max_pixels: int

    def frame_size(self, num_frames: int, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of each frame, for tokens of so many pixels a side."""
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MOST_UNEQUAL * min(height, width):
            raise UndecodableError(f"one edge is more than {_MOST_UNEQUAL} times the other")
        rows, columns = round(height / side) * side, round(width / side) * side
        area = round(num_frames / 2) * 2 * rows * columns
        if area > self.max_pixels:
            by = math.sqrt(num_frames * height * width / self.max_pixels)
            rows, columns = (
                max(side, math.floor(edge / by / side) * side) for edge in (height, width)
            )
        elif area < self.min_pixels:
            by = math.sqrt(self.min_pixels / (num_frames * height * width))
            rows, columns = (math.ceil(edge * by / side) * side for edge in (height, width))
        return rows, columns

    def max_tokens(self, side: int) -> int:
        """No frame has more tokens: one of two may have half of the area."""
        of_frame = Area(min_pixels=-(-self.min_pixels // 2), max_pixels=-(-self.max_pixels // 2))
        return of_frame.max_tokens(side)


class TokenBudget(msgspec.Struct, frozen=True, tag=True):
    """Gemma 4's: every image becomes as large as so many tokens allow, and keeps its ratio as far
    as whole tokens do."""

    tokens: int

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        """The height and width of an image, for tokens of so many pixels a side."""
        factor = math.sqrt(self.tokens * side**2 / (height * width))
        rows, columns = (math.floor(edge * factor / side) for edge in (height, width))
        if not rows:
            rows, columns = 1, min(math.floor(width / height), self.tokens)
        elif not columns:
            rows, columns = min(math.floor(height / width), self.tokens), 1
        return rows * side, columns * side

    def max_tokens(self, side: int) -> int:
        return self.tokens
