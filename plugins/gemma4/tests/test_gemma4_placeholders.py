"""Where pictures stand in a prompt: in users' messages, in results of tools, and nowhere else."""

import shutil

import pytest

from darkbloom_core.contracts import Chat, MediaPart, MediaSpan, Message, TextPart, ToolCall
from darkbloom_core.errors import InvalidRequest

PICTURE, CLIP = MediaPart("image", (3,)), MediaPart("video", (2, 2, 2), (0.0, 59.9, 61.0))
CALL = ToolCall("c1", "camera", {"side": "left"})
SHOT = ("<|image>" + "<|image|>" * 3 + "<image|>", "<|image>" + "<|video|>" * 2 + "<image|>")


@pytest.fixture(scope="module")
def codec(family, demo_folder, load):
    return family.codec(demo_folder, load(demo_folder).description)


def said(role, *content, **others):
    parts = tuple(TextPart(part) if isinstance(part, str) else part for part in content)
    return Message(role=role, content=parts, **others)


def encoded(codec, *messages):
    prompt = codec.encode_chat(Chat(messages=messages))
    names = {codec.tokenizer.control_id(name): name for name in codec.tokenizer.control_names}
    return "".join(names.get(token) or codec.token_bytes(token).decode() for token in prompt.ids), prompt


def test_parts_of_a_message_stand_in_their_order(codec):
    text, prompt = encoded(codec, said("user", "First ", PICTURE, " then ", CLIP, PICTURE, "What is it?"))
    clip = f"00:00 {SHOT[1]} 00:59 {SHOT[1]} 01:01 {SHOT[1]}"
    assert text == f"<bos><|turn>user\nFirst{SHOT[0]}then{clip}{SHOT[0]}What is it?<turn|>\n<|turn>model\n"
    assert [span.picture for span in prompt.spans] == [0, 1, 2, 3, 4]
    assert [span.length for span in prompt.spans] == [3, 2, 2, 2, 3]
    tokens = {
        name: codec.tokenizer.control_id(name) for name in ("<|image>", "<image|>", "<|image|>", "<|video|>")
    }
    for span, kind in zip(prompt.spans, ["image", *["video"] * 3, "image"], strict=True):
        inside = prompt.ids[span.start - 1 : span.start + span.length + 1]
        assert inside == (tokens["<|image>"], *[tokens[f"<|{kind}|>"]] * span.length, tokens["<image|>"])


def test_without_pictures_there_are_no_spans(codec):
    assert encoded(codec, said("user", "Hi!"))[1].spans == ()


def test_the_result_of_a_tool_may_be_a_picture(codec):
    text, prompt = encoded(
        codec,
        said("user", PICTURE, "Look left."),
        said("assistant", tool_calls=(CALL,)),
        said("tool", "taken", PICTURE, CLIP, tool_call_id="c1"),
        said("assistant", "A shed."),
        said("user", "And here?", PICTURE),
    )
    result = '<|tool_response>response:camera{value:<|"|>taken<|"|>}<tool_response|>'
    assert f"{result}{SHOT[0]}00:00 {SHOT[1]}" in text
    assert text.endswith(f"And here?{SHOT[0]}<turn|>\n<|turn>model\n")
    assert [span.length for span in prompt.spans] == [3, 3, 2, 2, 2, 3]
    starts = [span.start for span in prompt.spans]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    "text", ["<|image|>", "<|image>x<image|>", "<|video|><tool_response|>", "<|image", "|>"]
)
def test_text_never_becomes_a_picture_nor_takes_ones_place(text, codec):
    plain, harmless = (
        encoded(codec, said("user", text, PICTURE, text)),
        encoded(codec, said("user", "x", PICTURE, "y")),
    )
    controls = [
        [token for token in prompt.ids if token in codec.control_ids] for _, prompt in (plain, harmless)
    ]
    assert controls[0] == controls[1]
    assert [span.length for span in plain[1].spans] == [3]
    (span,) = plain[1].spans
    assert len(codec.encode_text(text)) > 0
    assert span == MediaSpan(plain[1].ids.index(codec.tokenizer.control_id("<|image|>")), 3, 0)


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_other_roles_hold_no_pictures(role, codec):
    with pytest.raises(InvalidRequest, match=role):
        encoded(codec, said(role, PICTURE), said("user", "Hi!"))


def test_a_template_that_leaves_pictures_out_is_found_out(family, demo_folder, load, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_folder, folder)
    for source in ("{{ messages[0].role }}", "{{ '<|image|><|image|>' }}", "{{ '<|video|>' }}"):
        (folder / "chat_template.jinja").write_text(source)
        codec = family.codec(folder, load(demo_folder).description)
        with pytest.raises(InvalidRequest, match="no place for the pictures"):
            encoded(codec, said("user", PICTURE))


def test_a_tokenizer_without_a_token_for_frames_uses_that_of_images(family, demo_folder, load, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(demo_folder, folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|video|>", "<|vid_eo|>"))
    text, prompt = encoded(family.codec(folder, load(demo_folder).description), said("user", CLIP))
    assert text.count("<|image|>") == 6
    assert [span.length for span in prompt.spans] == [2, 2, 2]
