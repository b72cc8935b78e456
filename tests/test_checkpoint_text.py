"""Tokenizer and chat template together: exact ids for text, no control token from a client's text."""

import json
import threading
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from darkbloom_core.checkpoint import ChatTemplate, TextTokenizer, read_stop_ids
from darkbloom_core.errors import CheckpointError, InvalidRequest, UnsupportedCheckpoint

CONTROLS = ["<|start|>", "<|end|>", "<|message|>", "<|turn>", "<turn|>", '<|"|>', "<eos>", "|>>", "<think>"]
CORPUS = ["the quick brown fox says hello to the world and the end of the start of a turn of message"] * 3
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{% endfor %}<|start|>assistant"
)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CONTROLS[:-1])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def byte_fallback():
    hexadecimal = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", *CONTROLS[:-1], *hexadecimal], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] not in hexadecimal
    ]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


BUILDERS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@pytest.fixture(scope="session", params=BUILDERS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    BUILDERS[request.param]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|start|>", "eos_token": {"content": "<eos>"}, "pad_token": None})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    return TextTokenizer(checkpoint, control_names=["<think>"])


@pytest.fixture(scope="session")
def template(checkpoint, tokenizer):
    return ChatTemplate(checkpoint, tokenizer)


def template_of(folder, tokenizer, source):
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder, tokenizer)


# text that is likely to be, to contain, or to add up to a control token
pieces = st.one_of(
    st.sampled_from(CONTROLS),
    st.sampled_from(CONTROLS).flatmap(lambda name: st.integers(0, len(name)).map(lambda cut: name[:cut])),
    st.sampled_from(CONTROLS).flatmap(lambda name: st.integers(0, len(name)).map(lambda cut: name[cut:])),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from([" ", "\n", "▁", "<0x41>", "\ue000", "é", "日", "the ", "\x7f"]),
)
hostile_text = st.lists(pieces, max_size=8).map("".join)


def roundtrips(folder_name, text):
    """What decoding must give back: a byte-fallback vocabulary itself writes spaces as U+2581."""
    return text.replace("▁", " ") if "fallback" in folder_name else text


# --- tokenizer ---------------------------------------------------------------


@settings(deadline=None)
@given(text=hostile_text)
def test_no_control_token_comes_out_of_text_and_no_text_is_lost(checkpoint, tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == roundtrips(checkpoint.name, text)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_ordinary_text_has_the_ids_of_the_publishers_tokenizer(checkpoint, tokenizer, text):
    publisher = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    if not any(name in text for name in CONTROLS):
        assert tokenizer.encode_text(text) == tuple(publisher.encode(text, add_special_tokens=False).ids)


def test_control_tokens_are_the_special_ones_and_those_named(checkpoint, tokenizer):
    assert {"<|start|>", "<think>"} <= tokenizer.control_names
    assert tokenizer.control_id("<|end|>") in tokenizer.control_ids
    assert tokenizer.control_id("the") is None
    unnamed = TextTokenizer(checkpoint)
    assert "<think>" not in unnamed.control_names
    think = tokenizer.control_id("<think>")
    assert unnamed.encode_text("<think>") == (think,)
    assert unnamed.token_bytes(think) == b"<think>"


def test_every_token_has_its_bytes_and_control_tokens_have_none(tokenizer):
    assert all(tokenizer.token_bytes(token) == b"" for token in tokenizer.control_ids)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    known = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.control_ids]
    assert all(tokenizer.token_bytes(token) for token in known)
    single = {tokenizer.token_bytes(token) for token in known}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_a_required_control_token_that_is_absent_is_named(checkpoint, tokenizer):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no special token <\|call\|>"):
        tokenizer.require_control_id("<|call|>")


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    publisher = byte_level()
    publisher.enable_truncation(4)
    publisher.enable_padding(length=64)
    publisher.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(tmp_path).decode(TextTokenizer(tmp_path).encode_text("hello world " * 9)) == (
        "hello world " * 9
    )


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    for content in (None, "{", "{}", '{"added_tokens": [1]}', '{"model": {"type": "Nonsense"}}'):
        if content is not None:
            file.write_text(content)
        with pytest.raises(CheckpointError) as caught:
            TextTokenizer(tmp_path)
        assert caught.value.message.startswith(f"{file}: ")
        assert "\n" not in caught.value.message


def test_a_tokenizer_without_bytes_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="no bytes"):
        TextTokenizer(tmp_path)


def test_a_tokenizer_whose_merges_reach_a_control_token_is_refused(tmp_path):
    vocabulary = {character: index for index, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary |= {"<e": 300, "<eo": 301}
    merges = [("<", "e"), ("<e", "o")]
    leaky = Tokenizer(models.BPE(vocabulary, merges))
    leaky.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    leaky.decoder = decoders.ByteLevel()
    leaky.add_special_tokens(["<eo"])
    leaky.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="the plain text <eo becomes a control token"):
        TextTokenizer(tmp_path)


def test_a_tokenizer_that_treats_the_start_of_a_text_specially_is_refused(tmp_path):
    prefixed = byte_level()
    prefixed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    prefixed.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="unlike text at the start"):
        TextTokenizer(tmp_path)


def test_stop_ids_come_from_config_generation_config_and_tokenizer(checkpoint, tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    eos, end = tokenizer.control_id("<eos>"), tokenizer.control_id("<|end|>")
    stops = read_stop_ids(tmp_path, {"eos_token_id": 2}, tokenizer, ["<|end|>", "<|absent|>"])
    assert stops == {2, 3, 4, eos, end}
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        read_stop_ids(tmp_path, {"eos_token_id": "x"}, tokenizer, [])


# --- chat template -----------------------------------------------------------


@settings(deadline=None)
@given(contents=st.lists(hostile_text, max_size=4))
def test_control_tokens_of_a_rendered_chat_are_the_templates_own(checkpoint, tokenizer, template, contents):
    messages = [{"role": "user", "content": content} for content in contents]
    ids = template.render({"messages": messages})
    start, message, end = (tokenizer.control_id(f"<|{name}|>") for name in ("start", "message", "end"))
    controls = [token for token in ids if token in tokenizer.control_ids]
    assert controls == [start, *[start, message, end] * len(contents), start]
    expected = "".join(f"user{content}" for content in contents) + "assistant"
    assert tokenizer.decode(ids) == roundtrips(checkpoint.name, expected)


@settings(deadline=None)
@given(first=hostile_text, second=hostile_text)
def test_texts_side_by_side_never_add_up_to_a_control_token(tmp_path_factory, tokenizer, first, second):
    folder = tmp_path_factory.getbasetemp() / "side-by-side"
    template = template_of(folder, tokenizer, "{{ a }}{{ b }}<|{{ a }}{{ b }}|>")
    ids = template.render({"a": first, "b": second})
    assert tokenizer.control_ids.isdisjoint(ids)


@settings(max_examples=40, deadline=None)
@given(
    value=st.dictionaries(
        hostile_text, st.lists(st.none() | st.integers() | hostile_text, max_size=2), max_size=3
    )
)
@pytest.mark.parametrize("ascii_only", ["false", "true"])
def test_json_in_a_prompt_is_exact_and_holds_no_control_token(
    tmp_path_factory, checkpoint, tokenizer, ascii_only, value
):
    folder = tmp_path_factory.getbasetemp() / f"json-{ascii_only}"
    template = template_of(folder, tokenizer, f"{{{{ value | tojson(ensure_ascii={ascii_only}) }}}}")
    ids = template.render({"value": value})
    assert tokenizer.control_ids.isdisjoint(ids)
    text = json.dumps(value, ensure_ascii=ascii_only == "true")
    assert tokenizer.decode(ids) == roundtrips(checkpoint.name, text)


@pytest.mark.parametrize(
    ("source", "text"),
    [("{{ text }}|>", "<|end"), ("<|{{ text }}", "end|>"), ("{{ text[:5] }}{{ text[5:] }}", "<|end|>")],
)
def test_text_of_the_template_does_not_complete_a_clients_text(tmp_path, tokenizer, source, text):
    ids = template_of(tmp_path, tokenizer, source).render({"text": text})
    assert tokenizer.decode(ids) == "<|end|>"
    assert tokenizer.control_ids.isdisjoint(ids)


def test_ordinary_conversations_have_the_ids_of_the_publishers_tokenizer(checkpoint, template):
    publisher = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = template.render({"messages": [{"role": "user", "content": "hello  world\n\nthe end"}]})
    text = "<|start|><|start|>user<|message|>hello  world\n\nthe end<|end|><|start|>assistant"
    assert ids == tuple(publisher.encode(text, add_special_tokens=False).ids)


def test_tokens_that_strip_their_neighbourhood_do_so(tmp_path):
    publisher = byte_level()
    publisher.add_special_tokens([AddedToken("<|sep|>", lstrip=True, rstrip=True, special=True)])
    publisher.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    template = template_of(tmp_path, tokenizer, "the \n<|sep|>  end <|end|> x")
    ids = publisher.encode("the \n<|sep|>  end <|end|> x", add_special_tokens=False).ids
    assert template.render({}) == tuple(ids)


def test_templates_see_what_they_are_promised(tmp_path, tokenizer):
    source = (
        "{%- for word in words %}\n"
        "    {%- if word == 'stop' %}{% break %}{% endif %}\n"
        "{{ word }}{% generation %}!{% endgeneration %}\n"
        "{% endfor %}"
        "{{ data | tojson(indent=1) }}|{{ strftime_now('%Y-%m-%d') }}|{{ eos_token }}{{ own }}"
    )
    template = template_of(tmp_path, tokenizer, source)
    ids = template.render(
        {"words": ["a", "b", "stop", "c"], "data": {"x": "<&>"}, "own": "<|end|>"},
        trusted={"own": "<|end|>"},
        today=date(2025, 3, 9),
    )
    assert tokenizer.decode(ids) == 'a!b!{\n "x": "<&>"\n}|2025-03-09|'
    assert ids[-2:] == (tokenizer.control_id("<eos>"), tokenizer.control_id("<|end|>"))


def test_what_a_template_refuses_or_cannot_render_is_the_requests_fault(tmp_path, tokenizer):
    template = template_of(tmp_path, tokenizer, "{{ raise_exception('no ' ~ what) }}")
    with pytest.raises(InvalidRequest, match=r"^no <\|end\|>$"):
        template.render({"what": "<|end|>"})
    for source in ("{{ a.b.c }}", "{{ 1 + 'x' }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        template = template_of(tmp_path, tokenizer, source)
        with pytest.raises(InvalidRequest, match="cannot render"):
            template.render({"messages": []})


def test_a_template_cannot_reach_python(tmp_path, tokenizer):
    planted = tmp_path / "executed"
    source = (
        "{% for c in ''.__class__.__mro__[-1].__subclasses__() %}"
        f"{{{{ c.__init__.__globals__['__builtins__']['open']('{planted}', 'w') }}}}{{% endfor %}}"
    )
    with pytest.raises(InvalidRequest):
        template_of(tmp_path, tokenizer, source).render({})
    assert not planted.exists()


def test_the_template_is_found_in_each_place_that_publishers_use(tmp_path, tokenizer):
    def text():
        return tokenizer.decode(ChatTemplate(tmp_path, tokenizer).render({}))

    def with_tools():
        return tokenizer.decode(ChatTemplate(tmp_path, tokenizer).render({"tools": ["t"]}))

    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: no such file"):
        text()
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert text() == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert (text(), with_tools()) == ("plain", "tools")
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(CheckpointError, match="without a template named default"):
        text()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert text() == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert text() == "from jinja"


def test_a_broken_template_is_named(tmp_path, tokenizer):
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not a chat template .*line 2"):
        template_of(tmp_path, tokenizer, "fine\n{% if %}")


def test_a_control_token_of_one_character_is_refused(tmp_path):
    publisher = byte_level()
    publisher.add_special_tokens(["日"])
    publisher.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="cannot be told from text"):
        template_of(tmp_path, TextTokenizer(tmp_path), "x")


def test_a_conversation_of_all_private_use_characters_is_refused_not_garbled(template):
    everything = "".join(
        chr(code)
        for block in (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        for code in block
    )
    with pytest.raises(InvalidRequest, match="private-use"):
        template.render({"messages": [{"role": "user", "content": everything}]})


def test_threads_share_a_template(template):
    texts = [f"the <|end|> {number}" * 20 for number in range(8)]
    alone = [template.render({"messages": [{"role": "user", "content": text}]}) for text in texts]
    together = [None] * len(texts)

    def work(place):
        for _ in range(20):
            together[place] = template.render({"messages": [{"role": "user", "content": texts[place]}]})

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
