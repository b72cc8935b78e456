"""Still pictures: formats, orientation, caps, damage."""

import sys
import zlib

import numpy as np
import pytest
from media_files import flat_png, long_gif, long_webp, picture_file
from PIL import Image
from pillow_heif import register_heif_opener

from darkbloom_core.errors import InvalidRequest
from darkbloom_core.media import MediaSource
from darkbloom_core.media._headers import gif_frames, parts_apart, sniff, webp_frames, webp_size
from darkbloom_core.media._picture import _pillow, _reads_heif, decode_picture, inspect_picture
from darkbloom_core.settings import MediaSettings

register_heif_opener()  # so that Pillow can write it; what may be read is asked elsewhere

SOURCE = MediaSource("image", "", "messages[0]")


def decode(data, **limits):
    return decode_picture(SOURCE, data, inspect_picture(SOURCE, data, MediaSettings(**limits)))


def corners(width=40, height=24):
    """Red, green, blue and white quarters, in this order from the left top."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = (255, 255, 255)
    return pixels


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("GIF", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 40),
        ("JPEG", {"quality": 95, "subsampling": 0}, 40),
        ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, 40),
        ("HEIF", {"quality": 95, "chroma": 444}, 40),
    ],
)
def test_every_format_gives_the_pixels(kind, options, tolerance):
    found = decode(picture_file(Image.fromarray(corners()), kind, **options))
    assert found.dtype == np.uint8
    assert found.shape == (24, 40, 3)
    error = np.abs(found.astype(int) - corners())
    inside = error if tolerance == 0 else error[[3, 20]][:, [3, 36]]  # colours run at the edges of others
    assert inside.max() <= tolerance


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "HEIF"])
def test_every_orientation_comes_the_right_way_up(kind):
    upright = Image.fromarray(corners())
    turns = [
        None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270,
    ]  # fmt: skip
    for orientation, turn in enumerate(turns, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright if turn is None else upright.transpose(turn)
        options = {"JPEG": {"quality": 95, "subsampling": 0, "exif": exif}, "HEIF": {"quality": 95}}
        stored.info["exif"] = exif.tobytes()  # where HEIC's writer looks for it
        found = decode(picture_file(stored, kind, **options.get(kind, {"lossless": True, "exif": exif})))
        assert found.shape == (24, 40, 3), orientation
        for row, column in ((5, 9), (5, 30), (18, 9), (18, 30)):
            assert np.abs(found[row, column].astype(int) - corners()[row, column]).max() < 30, orientation


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0MM", b"Exif\0\0 no TIFF at all", b"Exif\0\0MM\0*\0\0\0\x08\0\x03\x01\x12"]
)
def test_a_picture_whose_exif_data_cannot_be_read_is_taken_as_it_is_stored(kind, exif):
    assert decode(picture_file(Image.fromarray(corners()), kind, exif=exif)).shape == (24, 40, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_colour_becomes_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 20), 51400, np.uint16))
        expected = 200
    else:
        image, expected = Image.new("RGB", (20, 20), (255, 255, 255)).convert(mode), 255
    found = decode(picture_file(image, kind))
    assert found.shape == (20, 20, 3)
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_transparency_is_dropped_as_the_publishers_processors_drop_it():
    image = Image.new("RGBA", (20, 20), (10, 200, 30, 0))
    assert (decode(picture_file(image)) == (10, 200, 30)).all()
    palette = Image.new("P", (20, 20), 1)
    palette.putpalette([0, 0, 0, 250, 10, 10])
    assert (decode(picture_file(palette, transparency=b"\xff\x00")) == (250, 10, 10)).all()


def test_of_an_animation_only_the_first_frame_is_looked_at():
    first, second = Image.new("RGB", (20, 20), (255, 0, 0)), Image.new("RGB", (20, 20), (0, 0, 255))
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = picture_file(first, kind, save_all=True, append_images=[second], **options)
        assert (decode(data, image_frames=2) == (255, 0, 0)).all(), kind
        with pytest.raises(InvalidRequest, match="more than 1 frames"):
            decode(data, image_frames=1)


def test_frames_of_a_gif_are_counted_without_decoding_and_no_further_than_asked():
    for count in (1, 2, 7):
        assert gif_frames(long_gif(count), 100) == count
    assert gif_frames(long_gif(1000), 10) == 11
    assert gif_frames(long_gif(5)[:-20], 100) == 4  # what is there, and the one that breaks off counts too


def test_frames_of_a_webp_are_counted_from_its_chunks():
    images = [Image.new("RGB", (20, 20), (40 * number, 0, 0)) for number in range(5)]
    for count in (1, 2, 5):
        data = picture_file(
            images[0],
            "WEBP",
            save_all=True,
            append_images=images[1:count],
            lossless=True,
            minimize_size=False,
        )
        assert webp_frames(data) == count
    assert webp_frames(long_webp(1000)) == 1000
    for length in range(len(data)):
        assert 1 <= webp_frames(data[:length]) <= 5


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"quality": 80}, {"quality": 80, "exif": b"Exif\0\0MM\0*"}]
)
def test_the_size_of_a_webp_is_read_before_the_library_allocates_it(options):
    assert webp_size(picture_file(Image.new("RGB", (321, 123)), "WEBP", **options)) == (321, 123)


def test_pixels_at_the_cap_pass_and_a_row_more_does_not():
    assert decode(flat_png(100, 50), image_pixels=5000).shape == (50, 100, 3)
    with pytest.raises(InvalidRequest, match="100 x 51 pixels, and at most 5000"):
        decode(flat_png(100, 51), image_pixels=5000)


def test_pixels_of_heic_are_known_before_it_is_decoded_and_a_damaged_one_is_refused():
    data = picture_file(Image.fromarray(corners(80, 48)), "HEIF", quality=95)
    at_cap = inspect_picture(SOURCE, data, MediaSettings(image_pixels=48 * 80))
    assert (at_cap.format, at_cap.pixels) == ("HEIF", 48 * 80)
    with pytest.raises(InvalidRequest, match="80 x 48 pixels, and at most 3839"):
        decode(data, image_pixels=48 * 80 - 1)
    for length in range(12, len(data) - 1, len(data) // 20):
        with pytest.raises(InvalidRequest):
            decode(data[:length])


def with_parts(kind, count):
    """A picture with so many empty segments or chunks more than it needs."""
    data = picture_file(Image.fromarray(corners()), kind)
    if kind == "JPEG":
        return data[:2] + b"\xff\xe5\0\2" * count + data[2:]
    return data[:33] + (bytes(4) + b"prVt" + zlib.crc32(b"prVt").to_bytes(4, "big")) * count + data[33:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_so_many_parts_may_stand_beside_the_pixels_and_no_more(kind, monkeypatch):
    """Each takes thirty times its place in the file where a library keeps it, so they are counted before."""
    own = parts_apart(with_parts(kind, 0), 100)
    assert own == {"JPEG": 8, "PNG": 2}[kind]
    assert parts_apart(with_parts(kind, 50), 100) == own + 50
    assert parts_apart(with_parts(kind, 500_000), 100) == 101
    monkeypatch.setattr("darkbloom_core.media._picture.MOST_PARTS", own + 5)
    assert decode(with_parts(kind, 5)).shape == (24, 40, 3)
    with pytest.raises(InvalidRequest, match=f"more than {own + 5} segments or chunks"):
        decode(with_parts(kind, 6))


def test_a_truncated_file_of_any_format_is_refused():
    rng = np.random.default_rng(1)
    noise = Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8))
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture_file(noise, kind)
        for length in (0, 1, 4, 12, 20, 40, len(data) // 2, len(data) - 200):
            with pytest.raises(InvalidRequest):
                decode(data[:length])


def test_random_bytes_behind_any_signature_are_refused_and_nothing_else_happens():
    rng = np.random.default_rng(2)
    noise = Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8))
    refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture_file(noise, kind)
        for number in range(60):
            broken = bytearray(data)
            for place in rng.integers(8, len(data), 1 + number % 9):
                broken[place] = rng.integers(0, 256)
            try:
                assert decode(bytes(broken)).shape[2] == 3
            except InvalidRequest:
                refused += 1
        with pytest.raises(InvalidRequest):
            decode(data[:12] + rng.bytes(500))
    assert refused > 50


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"BM" + b"\0" * 100,
        b"\0" * 4096,
    ],
)
def test_other_files_are_refused_by_their_first_bytes(data):
    assert sniff(data) is None
    with pytest.raises(InvalidRequest, match="not a PNG, JPEG, WebP"):
        decode(data)


def test_without_its_library_a_picture_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    _pillow.cache_clear()
    with pytest.raises(InvalidRequest, match="need the package pillow"):
        decode(flat_png(20, 20))


def test_heic_without_its_package_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    _reads_heif.cache_clear()
    with pytest.raises(InvalidRequest, match="pillow-heif"):
        decode(b"\0\0\0\x18ftypheic" + b"\0" * 100)
    _reads_heif.cache_clear()
