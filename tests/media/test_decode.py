"""Pictures become the bytes that transformers makes of them; files that are none are refused."""

import io
import struct
import zlib

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageOps

from jaxllm.media.decode import cut, decode, of_array, places, to_patches
from jaxllm.media.decode_process import DecodeProcess
from jaxllm.media.item import ImageSpec, UndecodableError
from tests.media.models import encoded, picture

SPEC = ImageSpec(
    patch_size=4, merge=2, longest_edge=64, resample=3, scale=1 / 255, mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5), image_token="[IMG]", image_token_id=3, break_token_id=4, end_token_id=5,
    max_images=4,
)  # fmt: skip


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


def test_what_takes_too_long_is_killed():
    process = DecodeProcess(SPEC, timeout_s=1e-4)
    try:
        with pytest.raises(UndecodableError, match="takes too long"):
            process.patches(encoded(picture(2000, 2000)))
    finally:
        process.close()
