"""Pictures become the bytes that transformers makes of them; files that are none are refused."""

import io
import struct
import zlib

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageOps

from jaxllm.media.decode import cut, decode, of_array, places, to_patches
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.item import ImageSpec
from jaxllm.media.resizing import Area, LongestEdge, Tiles, TokenBudget, UndecodableError
from tests.media.models import encoded, picture

SPEC = ImageSpec(
    patch_size=4, merge=2, resizing=LongestEdge(64), resample=3, scale=1 / 255,
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), image_token="[IMG]", image_token_id=3,
    break_token_id=4, end_token_id=5, max_images=4,
)  # fmt: skip


GEMMA_4 = msgspec.structs.replace(SPEC, patch_size=4, merge=2, resizing=TokenBudget(70))
# As Qwen has it: images are limited in their area.
QWEN = msgspec.structs.replace(SPEC, resizing=Area(min_pixels=256, max_pixels=4096))


def rotated(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(30, 50), "JPEG", exif=exif)


def made_pictures():
    photo = Image.fromarray(picture(37, 61))
    grey16 = Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30) * 70)
    palette = photo.convert("P", palette=Image.Palette.ADAPTIVE)
    return {
        "photo": encoded(photo, "JPEG"),
        "grey": encoded(photo.convert("L")),
        "grey with alpha": encoded(photo.convert("LA")),
        "grey of 16 bits": encoded(grey16),
        "alpha": encoded(Image.fromarray(np.dstack([picture(37, 61), picture(37, 61, 1)[..., 0]]))),
        "palette": encoded(palette),
        "transparent palette": encoded(palette, transparency=3),
        "one bit": encoded(photo.convert("1")),
        "cmyk": encoded(photo.convert("CMYK"), "JPEG"),
        "animation": encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(90)]),
        "webp": encoded(photo, "WEBP", lossless=True),
        "one pixel": encoded(picture(1, 1)),
        "one pixel wide": encoded(picture(40, 1)),
        "as large as it stays": encoded(picture(64, 64)),
        "huge": encoded(picture(1200, 1700), "JPEG"),
        "long": encoded(picture(20, 1000)),
        **{f"turned {how}": rotated(how) for how in range(1, 9)},
    }


PICTURES = made_pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_those_of_transformers(name):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor = PixtralImageProcessorPil(
        size={"longest_edge": 64}, patch_size=8, do_rescale=False, do_normalize=False
    )
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(PICTURES[name])))
    (expected,) = processor(image, return_tensors="np")["pixel_values"]
    assert expected.dtype == np.uint8
    found = to_patches(decode(PICTURES[name]), SPEC)
    assert found == cut(expected.transpose(1, 2, 0), SPEC)


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_of_qwen_are_those_of_transformers(name):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 4096},
        patch_size=4,
        do_rescale=False,
        do_normalize=False,
    )
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(PICTURES[name])))
    made = processor(image, return_tensors="np")
    found = to_patches(decode(PICTURES[name]), QWEN)
    assert [1, found.rows, found.columns] == made["image_grid_thw"][0].tolist()
    expected = made["pixel_values"].reshape(-1, 3, 2, 16)
    np.testing.assert_array_equal(expected[:, :, 0], expected[:, :, 1])
    pixels = np.frombuffer(found.pixels, np.uint8).reshape(-1, 3, 16)
    np.testing.assert_array_equal(pixels, expected[:, :, 0])


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_of_gemma_4_are_those_of_transformers(name):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(
        max_soft_tokens=70, patch_size=4, pooling_kernel_size=2, do_rescale=False
    )
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(PICTURES[name])))
    made = processor(image, return_tensors="np")
    columns, rows = made["image_position_ids"][0].max(axis=0) + 1
    patches = made["pixel_values"][0][: rows * columns].reshape(rows, columns, 4, 4, 3)
    pixels = patches.transpose(0, 2, 1, 3, 4).reshape(rows * 4, columns * 4, 3)
    assert pixels.dtype == np.uint8
    assert to_patches(decode(PICTURES[name]), GEMMA_4) == cut(pixels, GEMMA_4)


def test_sizes_of_gemma_4_are_those_of_transformers():
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    sizes = np.exp(np.random.default_rng(0).uniform(0, 9, (2000, 2))).astype(int).tolist()
    for tokens in (70, 280, 1120):
        for height, width in [*sizes, (48, 48), (1, 5000), (5000, 1)]:
            size = TokenBudget(tokens).size(height, width, 48)
            expected = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
            assert size == expected
            assert size[0] * size[1] <= tokens * 48**2


def test_tiles_are_those_of_transformers():
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, do_rescale=False, do_normalize=False
    )
    more = {f"{h} x {w}": encoded(picture(h, w)) for h, w in [(3, 3), (16, 32), (40, 81), (9, 100)]}
    numbers = set()
    for least, most in ((1, 6), (1, 1), (2, 5), (3, 3)):
        resizing = Tiles(pixels=16, min_tiles=least, max_tiles=most)
        for name, file in (PICTURES | more).items():
            made = processor(
                ImageOps.exif_transpose(Image.open(io.BytesIO(file))),
                crop_to_patches=True,
                min_patches=least,
                max_patches=most,
                return_tensors="np",
            )
            tiles = made["pixel_values"]
            assert tiles.dtype == np.uint8 and made["num_patches"] == [len(tiles)]
            one_column = tiles.transpose(0, 2, 3, 1).reshape(-1, 16, 3)
            spec = msgspec.structs.replace(SPEC, resizing=resizing)
            assert to_patches(decode(file), spec) == cut(one_column, spec), (name, least, most)
            assert len(tiles) * 4 <= resizing.max_tokens(8)
            numbers.add(len(tiles))
    assert numbers == {1, 3, 4, 5, 6, 7}


def test_grids_of_tiles_are_those_of_transformers():
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(0, 9, (500, 2))).astype(int).tolist()
    sizes += [(448, 448), (633, 633), (634, 634), (1000, 1500), (896, 448), (1, 9000)]
    for least, most in ((1, 12), (4, 40), (7, 7)):
        tiles = Tiles(pixels=448, min_tiles=least, max_tiles=most)
        for size in sizes:
            columns, rows = get_optimal_tiled_canvas(tuple(size), (448, 448), least, most)
            assert tiles.size(*size, 28) == (448 * rows, 448 * columns)


def test_sizes_of_qwen_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for least, most, side in ((3136, 12_845_056, 28), (65_536, 16_777_216, 32), (256, 4096, 8)):
        area = Area(min_pixels=least, max_pixels=most)
        sizes = np.exp(rng.uniform(0, 9, (2000, 2))).astype(int).tolist()
        sizes += [(14, 14), (42, 70), (1, 200), (4000, 20), (5000, 5000)]
        for height, width in sizes:
            if max(height, width) > 200 * min(height, width):
                with pytest.raises(UndecodableError, match="200 times"):
                    area.size(height, width, side)
                continue
            size = area.size(height, width, side)
            assert size == smart_resize(height, width, side, least, most)
            assert size[0] * size[1] <= area.max_tokens(side) * side**2


def test_patches_and_their_places_go_together():
    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[..., 0] = np.arange(16)[:, None]
    pixels[..., 1] = np.arange(24)
    patches = cut(pixels, SPEC)
    of_patches = np.frombuffer(patches.pixels, np.uint8).reshape(-1, 3, 4, 4)
    where = places(patches.rows, patches.columns, 2)
    np.testing.assert_array_equal(of_patches[:, 0, 0, 0], 4 * where[:, 0])
    np.testing.assert_array_equal(of_patches[:, 1, 0, 0], 4 * where[:, 1])
    assert where[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_arrays_are_images(channels):
    array = np.random.default_rng(0).integers(0, 256, (9, 7, *channels), np.uint8)
    image = of_array("image", array)
    np.testing.assert_array_equal(np.asarray(image).reshape(array.shape), array)


def bomb():
    """A PNG of 14,000 x 14,000 pixels of one bit, in some kilobytes."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    size = 14_000
    header = struct.pack(">IIBBBBB", size, size, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((size // 8 + 1) * size), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


HOSTILE = {
    "too many pixels": (bomb(), "at most 40000000"),
    "cut off": (encoded(picture(60, 60))[:4000], "damaged"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image file"),
    "nothing": (b"", "not an image file"),
    "of another kind": (encoded(picture(8, 8), "TIFF"), "not an image file"),
    "too long": (encoded(picture(1, 10_000)), "nothing is left"),
}


@pytest.fixture(scope="module")
def process():
    process = DecodeProcess(SPEC)
    yield process
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_is_lost(name, process):
    data, reason = HOSTILE[name]
    with pytest.raises(UndecodableError, match=reason):
        process.patches(data)
    found = process.patches(PICTURES["photo"])  # the process lives, or there is another
    assert found == to_patches(decode(PICTURES["photo"]), SPEC)


def test_what_is_too_unequal_is_refused():
    with pytest.raises(UndecodableError, match="more than 200 times the other"):
        to_patches(decode(encoded(picture(1, 201))), QWEN)


def test_what_takes_too_long_is_killed():
    process = DecodeProcess(SPEC, timeout_s=1e-4)
    try:
        with pytest.raises(UndecodableError, match="takes too long"):
            process.patches(encoded(picture(2000, 2000)))
    finally:
        process.close()
