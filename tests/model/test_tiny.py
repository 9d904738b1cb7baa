from hypothesis import given
from hypothesis import strategies as st

from whet.model.load import byte_tokenizer, char_tokenizer


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_read_and_write_any_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_tiny_tokenizers_agree_on_their_special_tokens() -> None:
    assert len(byte_tokenizer()) == 2 + 256
    for tokenizer in (byte_tokenizer(), char_tokenizer("abc")):
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
