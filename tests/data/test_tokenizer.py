"""Tokenizers: ids of the golden file, begin and end markers, text that streams without breaking."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(golden_folder):
    return load_tokenizer(str(golden_folder))


@pytest.fixture
def folder(golden_folder, tmp_path):
    """A writable copy of the golden tokenizer, and how to change one of its files."""
    copy = tmp_path / "tok"
    copy.mkdir()
    for file in golden_folder.iterdir():
        shutil.copyfile(file, copy / file.name)

    def edit(name, **changes):
        path = copy / name
        value = json.loads(path.read_text()) if path.exists() else {}
        for key, new in changes.items():
            value.pop(key, None) if new is ... else value.update({key: new})
        path.write_text(json.dumps(value))
        return str(copy)

    return edit


def test_ids_and_text_equal_the_golden_file(tokenizer, golden):
    for entry in golden["encodings"]:
        assert tokenizer.encode(entry["text"]).tolist() == entry["ids"]
        assert tokenizer.decode(entry["ids"]) == entry["decoded"]
        assert tokenizer.decode(entry["ids"], skip_special=True) == entry["decoded_skip_special"]
    for chat in golden["chats"]:
        assert tokenizer.encode(chat["rendered"]).tolist() == chat["ids"]
    for name, number in golden["special_ids"].items():
        assert tokenizer.special[name] == number


def test_many_texts_at_once_give_the_same_ids(tokenizer, byte, golden):
    texts = [entry["text"] for entry in golden["encodings"]]
    for one in (tokenizer, byte):
        many = one.encode_documents(texts)
        assert [ids.tolist() for ids in many] == [one.encode(text).tolist() for text in texts]


def test_the_copy_in_the_checkout_is_the_shared_one(golden_folder):
    from pathlib import Path

    copy = Path(__file__).parent / "tokenizer"
    for file in golden_folder.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes()


def test_streamed_text_is_the_decoded_text(tokenizer, byte, golden):
    for entry in golden["encodings"]:
        for one in (tokenizer, byte):
            for skip in (False, True):
                ids = one.encode(entry["text"])
                stream = one.decode_stream(skip)
                text = "".join(stream.push(token) for token in ids) + stream.flush()
                assert text == one.decode(ids, skip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_streaming_any_ids_equals_decoding_them(tokenizer, ids):
    stream = tokenizer.decode_stream()
    assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_half_a_character_waits_for_its_other_half(byte, tokenizer):
    for one in (byte, tokenizer):
        stream = one.decode_stream()
        pieces = [stream.push(token) for token in one.encode("\U0001f642!")]
        assert pieces[-1] == "!" and "\ufffd" not in "".join(pieces)
        assert "" in pieces


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_the_byte_tokenizer_gives_back_any_text(byte, text):
    ids = byte.encode(text)
    assert byte.decode(ids) == text
    assert len(byte.encode_document(text)) <= len(ids) + 2


def test_the_byte_tokenizer_is_as_documented(byte):
    assert byte.size == 264 and byte.eos_id == byte.bos_id == 256
    assert byte.encode_document("ab").tolist() == [256, 97, 98, 256]
    assert byte.encode("<|im_start|>a<|im_end|>").tolist() == [257, 97, 258]
    assert byte.special["<|reserved_4|>"] == 263
    assert byte.decode([104, 256, 105], skip_special=True) == "hi"
    assert byte.decode([104, 9999, 105]) == "hi"


def test_a_document_ends_once_and_begins_only_where_transformers_begins_it(tokenizer, folder):
    assert tokenizer.bos_id is None and tokenizer.eos_id == 2
    assert tokenizer.encode_document("H").tolist() == [43, 2]
    assert tokenizer.encode_document("H<|im_end|>").tolist() == [43, 2]
    # a declared but unused begin token (GPT-2's way) is not put anywhere
    unused = load_tokenizer(
        folder("tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=...)
    )
    assert unused.bos_id is None and unused.encode_document("H").tolist() == [43, 2]
    # add_bos_token decides (Llama 2's way), and a begin that the text has already is not doubled
    used = load_tokenizer(folder("tokenizer_config.json", add_bos_token=True))
    assert used.bos_id == 0 and used.encode_document("H").tolist() == [0, 43, 2]
    assert used.encode_document("<|endoftext|>H").tolist() == [0, 43, 2]
    assert used.encode("H").tolist() == [43]
    # add_eos_token of the file does not add a second end
    both = load_tokenizer(folder("tokenizer_config.json", add_eos_token=True))
    assert both.encode_document("H").tolist() == [0, 43, 2]


def test_a_begin_from_the_post_processor_is_used(folder):
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    folder("tokenizer.json", post_processor=template)
    # Llama 3's way: no add_bos_token anywhere, the post-processor says it
    one = load_tokenizer(folder("tokenizer_config.json", add_bos_token=...))
    assert one.bos_id == 0 and one.encode_document("H").tolist() == [0, 43, 2]
    # add_bos_token: false wins over the post-processor
    two = load_tokenizer(folder("tokenizer_config.json", add_bos_token=False))
    assert two.bos_id is None and two.encode_document("H").tolist() == [43, 2]


def test_truncation_and_padding_stored_in_the_file_lose_no_text(folder):
    path = folder(
        "tokenizer.json",
        truncation={
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 3,
            "pad_type_id": 0,
            "pad_token": "<|pad|>",
        },
    )
    one = load_tokenizer(path)
    assert one.decode(one.encode("one two three four five")) == "one two three four five"


def test_the_end_token_is_found_without_tokenizer_config(folder, tmp_path):
    (tmp_path / "tok" / "tokenizer_config.json").unlink()
    (tmp_path / "tok" / "special_tokens_map.json").unlink()
    path = str(tmp_path / "tok")
    assert load_tokenizer(path).eos_id == 0  # the usual name <|endoftext|>
    folder("config.json", text_config={"eos_token_id": [2, 0]})
    assert load_tokenizer(path).eos_id == 2
    folder("generation_config.json", eos_token_id=1)
    one = load_tokenizer(path)
    assert one.eos_id == 1 and one.stop_ids == (1, 2, 0)
    folder("special_tokens_map.json", eos_token={"content": "<|im_end|>", "special": True})
    assert load_tokenizer(path).eos_id == 2
    # ids of a model that this tokenizer does not have are not taken
    folder("generation_config.json", eos_token_id=151645)
    assert load_tokenizer(path).stop_ids == (2, 0)


def test_a_padding_token_is_neither_needed_nor_added(folder):
    one = load_tokenizer(folder("tokenizer_config.json", pad_token="<|nowhere|>"))
    assert one.size == 512 and "<|nowhere|>" not in one.special
    assert load_tokenizer(folder("tokenizer_config.json", pad_token=None)).size == 512


def test_an_end_token_that_is_not_in_the_vocabulary_is_refused_by_name(folder):
    with pytest.raises(DataError, match=r"eos_token '<\|nowhere\|>' .* is not in tokenizer.json"):
        load_tokenizer(folder("tokenizer_config.json", eos_token="<|nowhere|>"))


def test_tokens_declared_only_in_the_config_get_their_ids_or_are_refused(folder):
    def entry(content):
        return {"content": content, "special": True, "normalized": False}

    path = folder("tokenizer_config.json", added_tokens_decoder={"512": entry("<|tool|>")})
    one = load_tokenizer(path)
    assert one.size == 513 and one.encode("H<|tool|>H").tolist() == [43, 512, 43]
    path = folder("tokenizer_config.json", added_tokens_decoder={"900": entry("<|tool|>")})
    with pytest.raises(DataError, match="the files do not belong together"):
        load_tokenizer(path)


def test_saving_and_loading_again_changes_nothing(tokenizer, byte, tmp_path):
    for one in (tokenizer, byte):
        folder = str(tmp_path / one.name.replace("/", "_"))
        one.save(folder)
        again = load_tokenizer(folder)
        text = "Hello, <|im_start|>w\u00f6rld"
        assert again.hash == one.hash and again.size == one.size
        assert again.encode_document(text).tolist() == one.encode_document(text).tolist()
        assert again.stop_ids == one.stop_ids and again.chat_template == one.chat_template


def test_the_hash_changes_with_the_end_token_and_with_the_file(tokenizer, folder):
    same = load_tokenizer(folder("tokenizer_config.json"))
    assert same.hash == tokenizer.hash
    assert load_tokenizer(folder("tokenizer_config.json", eos_token="<|pad|>")).hash != same.hash


def test_a_tokenizer_file_alone_is_enough(folder, tmp_path):
    path = tmp_path / "my.json"
    path.write_bytes((tmp_path / "tok" / "tokenizer.json").read_bytes())
    one = load_tokenizer(str(path))
    assert one.encode("H").tolist() == [43] and one.eos_id == 0


def test_byte_fallback_streams_whole_characters():
    """A sentencepiece-like tokenizer: known words with a leading mark, other bytes as <0xNN>."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    from localtrain.data.hub_tokenizer import HubTokenizer

    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}}
    for word in ("\u2581", "a", "b", "\u2581a"):
        vocab[word] = len(vocab)
    model = models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    rust = tokenizers.Tokenizer(model)
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens(["</s>"])
    one = HubTokenizer("t", rust.to_str(), {})
    assert one.eos_id == 1
    for text in ("a b", "ab\u00e9\u4f60 a\U0001f642b", "\u4f60\u4f60", " a  b"):
        for repeat in (1, 9):
            ids = one.encode(text * repeat)
            stream = one.decode_stream()
            pieces = [stream.push(token) for token in ids]
            assert "".join(pieces) + stream.flush() == one.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a tokenizer.json that can be read"),
        (b"\xff\xfe", "not a tokenizer.json"),
        (b'{"model": {"type": "BPE"', "not a tokenizer.json that can be read"),
    ],
)
def test_a_damaged_tokenizer_is_a_data_error_that_names_it(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_damaged_side_file_is_a_data_error_that_names_it(folder, tmp_path):
    for content in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "tok" / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer_config\.json"):
            load_tokenizer(str(tmp_path / "tok"))


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"hf download Qwen/Qwen3-0\.6B tokenizer\.json"):
        load_tokenizer("Qwen/Qwen3-0.6B")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no tokenizer\.json; it has tokenizer\.model"):
        load_tokenizer(str(tmp_path))
